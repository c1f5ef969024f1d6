// huorn._native.Reader. Who calls keeps the memory that copies write into alive until they are complete.
#include "reader_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace huorn {
namespace {

using SegmentTuple = std::tuple<int, uint64_t, uint64_t, uint64_t>;           // file, offset, bytes, address
using CompletionTuple = std::tuple<int64_t, int, int, uint64_t>;              // key, error, file, offset
constexpr auto kSignals = std::chrono::milliseconds(100);                     // how long Ctrl-C may wait
constexpr double kLongestSeconds = 1e9;                                       // 30 years: what the clock can count

int add_file(Reader& reader, nb::object path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw nb::python_error();
  nb::object name = nb::steal(bytes);
  try {
    return reader.add_file(PyBytes_AS_STRING(bytes));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    throw nb::python_error();
  }
}

void submit(Reader& reader, int64_t key, const std::vector<SegmentTuple>& tuples, bool demand) {
  std::vector<Segment> segments;
  segments.reserve(tuples.size());
  for (auto [file, offset, bytes, address] : tuples) segments.push_back({&reader.file(file), offset, bytes, address});
  reader.queue().submit(key, std::move(segments), demand);
}

std::vector<CompletionTuple> wait(Reader& reader, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  double seconds = timeout_s > 0 ? std::min(timeout_s, kLongestSeconds) : 0;
  auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::vector<Completion> completions;
  while (true) {
    {
      nb::gil_scoped_release release;
      completions = reader.queue().wait(std::clamp<Clock::duration>(end - Clock::now(), Clock::duration::zero(), kSignals));
    }
    if (!completions.empty() || Clock::now() >= end) break;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  std::vector<CompletionTuple> tuples;
  tuples.reserve(completions.size());
  for (const auto& [key, failure] : completions) tuples.emplace_back(key, failure.error, failure.file, failure.offset);
  return tuples;
}

}  // namespace

void bind_reader(nb::module_& m) {
  nb::class_<Reader>(m, "Reader")
      .def(nb::init<int, int64_t, bool, bool, int, double>(), "lanes"_a, "stripe_bytes"_a, "direct"_a, "uring"_a, "ahead_lanes"_a = 0,
           "link_bytes_s"_a = 0.0)
      .def("add_file", &add_file, "path"_a)
      .def("direct", [](const Reader& reader, int file) { return reader.file(file).direct(); }, "file"_a)
      .def_prop_ro("engine", &Reader::engine)
      .def("submit", &submit, "key"_a, "segments"_a, "demand"_a)
      .def("promote", [](Reader& reader, int64_t key) { return reader.queue().promote(key); }, "key"_a)
      .def("cancel", [](Reader& reader, int64_t key) { return reader.queue().cancel(key); }, "key"_a)
      .def("wait", &wait, "timeout_s"_a)
      .def_prop_ro("bytes_read", [](Reader& reader) { return reader.queue().bytes_read(); })
      .def_prop_ro("busy_s", [](Reader& reader) { return reader.queue().busy_seconds(); })
      .def_prop_ro("in_flight", [](Reader& reader) { return reader.queue().in_flight(); });
}

}  // namespace huorn
