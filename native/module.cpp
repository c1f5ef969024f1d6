// The Python module huorn._native: kernels on raw addresses, and the reader (reader_module.cpp). Who calls keeps the memory alive and the shapes right; the
// Python classes in huorn.kernels.cpu do both.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "candidates.h"
#include "reader_module.h"
#include "step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace huorn {
namespace {

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* one : available_kernels()) names.emplace_back(one->name);
  return names;
}

}  // namespace
}  // namespace huorn

NB_MODULE(_native, m) {
  using namespace huorn;
  m.def("isas", &isas, "Variants this CPU can run, the best last.");

  m.def("has_nan_code", [](Address codes, size_t count) { return has_nan_code(at<uint8_t>(codes), count); }, "codes"_a, "count"_a,
        "Whether one of the E4M3 codes is NaN.");

  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, Address data, Address scale, int rows, int cols, int format) {
             new (self) Matrix{at<uint8_t>(data), at<float>(scale), rows, cols, static_cast<Format>(format)};
           },
           "data"_a, "scale"_a, "rows"_a, "cols"_a, "format"_a);

  nb::class_<CodedRows>(m, "CodedRows")
      .def("__init__",
           [](CodedRows* self, Address codes, Address scale, Address spread, int rows, int cols, float largest_x) {
             new (self) CodedRows{at<int8_t>(codes), at<float>(scale), at<float>(spread), rows, cols, largest_x};
           },
           nb::kw_only(), "codes"_a, "scale"_a, "spread"_a, "rows"_a, "cols"_a, "largest_x"_a);

  nb::class_<GroupedCodes>(m, "GroupedCodes")
      .def("__init__",
           [](GroupedCodes* self, Address codes, Address scale, Address bias, int rows, int cols) {
             new (self) GroupedCodes{at<int8_t>(codes), at<float>(scale), at<float>(bias), rows, cols};
           },
           nb::kw_only(), "codes"_a, "scale"_a, "bias"_a, "rows"_a, "cols"_a);

  nb::class_<PredictorBank>(m, "PredictorBank")
      .def("__init__",
           [](PredictorBank* self, const GroupedCodes& in, const GroupedCodes& out, const GroupedCodes& router, Address a, Address b,
              int hidden, int experts, int groups) {
             new (self) PredictorBank{in, out, router, at<float>(a), at<float>(b), hidden, experts, groups};
           },
           nb::kw_only(), "w_in"_a, "w_out"_a, "w_router"_a, "a"_a, "b"_a, "hidden"_a, "experts"_a, "groups"_a);

  nb::class_<HeadFeatures>(m, "HeadFeatures")
      .def("__init__",
           [](HeadFeatures* self, Address heads, Address blocks, Address no_logits, int head_count, int block_count, int hidden,
              int experts, int top_k, int table_width, int inputs) {
             new (self) HeadFeatures{at<int32_t>(heads), at<int32_t>(blocks), at<int32_t>(no_logits), head_count, block_count,
                                     hidden,             experts,             top_k,                  table_width, inputs};
           },
           nb::kw_only(), "heads"_a, "blocks"_a, "no_logits"_a, "head_count"_a, "block_count"_a, "hidden"_a, "experts"_a, "top_k"_a,
           "table_width"_a, "inputs"_a);

  m.def("candidates",
        [](Address lower, Address upper, size_t rows, size_t k, Address ids, size_t room) {
          return candidates(at<float>(lower), at<float>(upper), rows, k, at<int64_t>(ids), room);
        },
        "lower"_a, "upper"_a, "rows"_a, "k"_a, "ids"_a, "room"_a,
        "How many rows can be among the k largest; the first `room` of their ids are written, ascending.");

  nb::class_<DeltaNet>(m, "DeltaNet")
      .def("__init__",
           [](DeltaNet* self, const Matrix& qkv, const Matrix& z, const Matrix& b, const Matrix& a, const Matrix& out,
              Address norm_scale, Address taps, Address negative_rate, Address dt_bias, Address gated_scale, float eps, int hidden,
              int key_heads, int value_heads, int dk, int dv, int kernel) {
             new (self) DeltaNet{qkv, z, b, a, out, at<float>(norm_scale), at<float>(taps), at<float>(negative_rate),
                                 at<float>(dt_bias), at<float>(gated_scale), eps, hidden, key_heads, value_heads, dk, dv, kernel};
           },
           nb::kw_only(), "qkv"_a, "z"_a, "b"_a, "a"_a, "out"_a, "norm_scale"_a, "taps"_a, "negative_rate"_a, "dt_bias"_a,
           "gated_scale"_a, "eps"_a, "hidden"_a, "key_heads"_a, "value_heads"_a, "dk"_a, "dv"_a, "kernel"_a);

  nb::class_<Attention>(m, "Attention")
      .def("__init__",
           [](Attention* self, const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& o, Address norm_scale, Address q_scale,
              Address k_scale, float eps, int hidden, int heads, int kv_heads, int head_dim, int rotary_dim) {
             new (self) Attention{q, k, v, o, at<float>(norm_scale), at<float>(q_scale), at<float>(k_scale), eps, hidden, heads,
                                  kv_heads, head_dim, rotary_dim};
           },
           nb::kw_only(), "q"_a, "k"_a, "v"_a, "o"_a, "norm_scale"_a, "q_scale"_a, "k_scale"_a, "eps"_a, "hidden"_a, "heads"_a,
           "kv_heads"_a, "head_dim"_a, "rotary_dim"_a);

  nb::class_<Router>(m, "Router")
      .def("__init__",
           [](Router* self, const Matrix& router, const Matrix& shared_gate, Address norm_scale, float eps, int hidden, int experts,
              int top_k) {
             new (self) Router{router, shared_gate, at<float>(norm_scale), eps, hidden, experts, top_k};
           },
           nb::kw_only(), "router"_a, "shared_gate"_a, "norm_scale"_a, "eps"_a, "hidden"_a, "experts"_a, "top_k"_a);

  nb::class_<ExpertLayer>(m, "ExpertLayer")
      .def("__init__",
           [](ExpertLayer* self, Address experts, int format, int hidden, int inter, const Matrix& shared_gate, const Matrix& shared_up,
              const Matrix& shared_down) {
             new (self) ExpertLayer{at<Expert>(experts), static_cast<Format>(format), hidden, inter, shared_gate, shared_up,
                                    shared_down};
           },
           nb::kw_only(), "experts"_a, "format"_a, "hidden"_a, "inter"_a, "shared_gate"_a, "shared_up"_a, "shared_down"_a);

  nb::class_<Layers>(m, "Layers")
      .def(nb::init<>())
      .def("add", &Layers::add_delta_net, "mixer"_a, "router"_a, "experts"_a)
      .def("add", &Layers::add_attention, "mixer"_a, "router"_a, "experts"_a);

  nb::class_<Runtime>(m, "Runtime")
      .def(nb::init<int, const std::string&>(), "threads"_a, "isa"_a)
      .def_prop_ro("isa", &Runtime::isa)
      .def_prop_ro("threads", &Runtime::threads)
      .def("counters", &Runtime::counters, "(bytes of weights, bytes of state) read so far.")
      .def("seconds", &Runtime::seconds, "Seconds spent in kernels so far.")
      .def("linear", &Runtime::linear, "matrix"_a, "norm_scale"_a, "eps"_a, "x"_a, "tokens"_a, "columns"_a, "y"_a)
      .def("embed", &Runtime::embed, "table"_a, "format"_a, "hidden"_a, "ids"_a, "tokens"_a, "x"_a)
      .def("code_rows", &Runtime::code_rows, "weight"_a, "rows"_a, "cols"_a, "codes"_a, "scale"_a, "spread"_a)
      .def("bound_rows", &Runtime::bound_rows, "rows"_a, "norm_scale"_a, "eps"_a, "x"_a, "tokens"_a, "lower"_a, "upper"_a)
      .def("score_heads", &Runtime::score_heads, "bank"_a, "first"_a, "heads"_a, "x"_a, "features"_a, "base"_a, "work"_a, "scores"_a,
           "probabilities"_a)
      .def("head_features", &Runtime::head_features, "what"_a, "hidden"_a, "logits"_a, "routed"_a, "previous"_a, "prior"_a, "token"_a,
           "next_token"_a, "position"_a, "x"_a, "base"_a)
      .def("read_memory", &Runtime::read_memory, "data"_a, "bytes"_a)
      .def("multiply", &Runtime::multiply, "rounds"_a);

  nb::class_<Step>(m, "Step")
      .def(nb::init<Runtime&, Address, std::vector<int>, int, Address, Address, Address, Address, Address, Address, Address, Address, Address, Address>(),
           nb::keep_alive<1, 2>(), nb::kw_only(), "runtime"_a, "x"_a, "lengths"_a, "columns"_a, "logits"_a = 0,
           "normed"_a = 0, "ids"_a = 0, "weights"_a = 0, "gate"_a = 0, "pair_out"_a = 0, "shared_out"_a = 0, "routed"_a = 0, "kept_normed"_a = 0,
           "kept_logits"_a = 0)
      .def("linear_states", &Step::linear_states, "conv_in"_a, "conv_out"_a, "memory_in"_a, "memory_out"_a)
      .def("caches", &Step::caches, "keys"_a, "values"_a, "positions"_a, "cosine"_a, "sine"_a)
      .def("delta_net", &Step::delta_net, "layer"_a, "router"_a.none(), "number"_a)
      .def("attention", &Step::attention, "layer"_a, "router"_a.none(), "number"_a)
      .def("look_ahead", &Step::look_ahead, "ids"_a)
      .def("run", &Step::run, "layers"_a, "first"_a)
      .def("run_ready", &Step::run_ready, "layers"_a, "number"_a)
      .def("run_plan", &Step::run_plan, "layer"_a, "pairs"_a, "pair_count"_a, "chunks"_a, "chunk_count"_a, "top_k"_a,
           "with_shared"_a)
      .def("combine", &Step::combine, "top_k"_a, "hidden"_a, nb::call_guard<nb::gil_scoped_release>());

  bind_reader(m);
}
