// The Python module huorn._native: kernels on raw addresses. Who calls keeps the memory alive and the shapes right; the
// Python classes in huorn.kernels.cpu do both.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace huorn {
namespace {

using Address = uintptr_t;
using Addresses = std::vector<Address>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

class Runtime {
 public:
  Runtime(int threads, const std::string& isa) : pool_(nullptr), kernels_(nullptr) {
    for (const Kernels* one : available_kernels())
      if (isa == one->name) kernels_ = one;
    if (kernels_ == nullptr) throw std::invalid_argument("this CPU has no " + isa);
    if (threads < 1) throw std::invalid_argument("threads must be 1 or more");
    pool_ = pool_create(threads);
  }
  ~Runtime() {
    if (pool_ != nullptr) pool_destroy(pool_);
  }
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  std::string isa() const { return kernels_->name; }
  int threads() const { return pool_threads(*pool_); }
  std::tuple<int64_t, int64_t> counters() const {
    Counters c = pool_counters(*pool_);
    return {c.weight_bytes, c.state_bytes};
  }

  double seconds() const { return pool_seconds(*pool_); }

  void linear(const Matrix& m, Address norm_scale, float eps, Address x, int tokens, int columns, Address y) {
    nb::gil_scoped_release release;
    kernels_->linear(*pool_, m, at<float>(norm_scale), eps, at<float>(x), tokens, columns, at<float>(y));
  }

  void embed(Address table, int format, int hidden, Address ids, int tokens, Address x) {
    kernels_->embed(at<uint8_t>(table), static_cast<Format>(format), hidden, at<int64_t>(ids), tokens, at<float>(x));
  }

  double read_memory(Address data, size_t bytes) {
    nb::gil_scoped_release release;
    return kernels_->read_memory(*pool_, at<uint8_t>(data), bytes);
  }

  double multiply(int rounds) {
    nb::gil_scoped_release release;
    return kernels_->multiply(*pool_, rounds);
  }

 private:
  friend class Step;

  Pool* pool_;
  const Kernels* kernels_;
};

// One forward over some sequences: what its kernel calls share, so that Python hands over little per layer. Between two calls
// the weights of a layer have pushed Python out of the caches, and every object it touches then costs a trip to RAM.
class Step {
 public:
  Step(Runtime& runtime, Address x, std::vector<int> lengths, int columns, Address logits, Address normed, Address ids,
       Address weights, Address gate, Address pair_out, Address shared_out)
      : runtime_(runtime), lengths_(std::move(lengths)), logits_(at<float>(logits)), normed_(at<float>(normed)),
        ids_(at<int32_t>(ids)), weights_(at<float>(weights)), gate_(at<float>(gate)), pair_out_(at<float>(pair_out)),
        shared_out_(at<float>(shared_out)) {
    int tokens = 0;
    for (int length : lengths_) tokens += length;
    batch_ = {at<float>(x), tokens, static_cast<int>(lengths_.size()), lengths_.data(), columns};
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // States of sequence s in linear layer n at [n * sequences + s].
  void linear_states(const Addresses& conv_in, const Addresses& conv_out, const Addresses& memory_in, const Addresses& memory_out) {
    linear_.clear();
    for (size_t i = 0; i < conv_in.size(); ++i)
      linear_.push_back({at<float>(conv_in[i]), at<float>(conv_out.at(i)), at<float>(memory_in.at(i)), at<float>(memory_out.at(i))});
  }

  // Caches of sequence s in full layer n at [n * sequences + s]; rotations of all tokens.
  void caches(const Addresses& keys, const Addresses& values, const std::vector<int>& positions, Address cosine, Address sine) {
    caches_.clear();
    for (size_t i = 0; i < keys.size(); ++i)
      caches_.push_back({at<void>(keys[i]), at<void>(values.at(i)), positions.at(i % lengths_.size())});
    cosine_ = at<float>(cosine);
    sine_ = at<float>(sine);
  }

  // A mixer, and behind it the router.
  void delta_net(const DeltaNet& layer, const Router* router, int number) {
    nb::gil_scoped_release release;
    runtime_.kernels_->delta_net(*runtime_.pool_, layer, batch_, &linear_.at(static_cast<size_t>(number) * lengths_.size()));
    if (router != nullptr) route(*router);
  }

  void attention(const Attention& layer, const Router* router, int number) {
    nb::gil_scoped_release release;
    runtime_.kernels_->attention(*runtime_.pool_, layer, batch_, &caches_.at(static_cast<size_t>(number) * lengths_.size()), cosine_,
                                 sine_);
    if (router != nullptr) route(*router);
  }

  void route(const Router& router) {
    runtime_.kernels_->route(*runtime_.pool_, router, batch_, logits_, normed_, ids_, weights_, gate_);
  }

  void run_plan(const ExpertLayer& layer, Address pairs, int pair_count, Address chunks, int chunk_count, int top_k, bool with_shared) {
    nb::gil_scoped_release release;
    runtime_.kernels_->run_plan(*runtime_.pool_, layer, normed_, batch_.tokens, top_k, at<int32_t>(pairs), pair_count,
                                at<Chunk>(chunks), chunk_count, with_shared, batch_.columns, pair_out_, shared_out_);
  }

  // The per-pair route and the sum: every pair alone, in the order of tokens and ranks.
  void run_pairs(const ExpertLayer& layer, int top_k) {
    nb::gil_scoped_release release;
    int pairs = batch_.tokens * top_k;
    while (static_cast<int>(order_.size()) < pairs) order_.push_back(static_cast<int32_t>(order_.size()));
    chunks_.resize(static_cast<size_t>(pairs));
    for (int i = 0; i < pairs; ++i) chunks_[static_cast<size_t>(i)] = {ids_[i], i, 1};
    runtime_.kernels_->run_plan(*runtime_.pool_, layer, normed_, batch_.tokens, top_k, order_.data(), pairs, chunks_.data(), pairs,
                                true, batch_.columns, pair_out_, shared_out_);
    combine(top_k, layer.hidden);
  }

  void combine(int top_k, int hidden) {
    runtime_.kernels_->combine(*runtime_.pool_, batch_.x, pair_out_, weights_, shared_out_, gate_, batch_.tokens, top_k, hidden);
  }

 private:
  Runtime& runtime_;
  std::vector<int> lengths_;
  Batch batch_{};
  std::vector<LinearState> linear_;
  std::vector<KeyValueCache> caches_;
  std::vector<int32_t> order_;
  std::vector<Chunk> chunks_;
  const float* cosine_ = nullptr;
  const float* sine_ = nullptr;
  float* logits_;
  float* normed_;
  int32_t* ids_;
  float* weights_;
  float* gate_;
  float* pair_out_;
  float* shared_out_;
};

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

  nb::class_<Runtime>(m, "Runtime")
      .def(nb::init<int, const std::string&>(), "threads"_a, "isa"_a)
      .def_prop_ro("isa", &Runtime::isa)
      .def_prop_ro("threads", &Runtime::threads)
      .def("counters", &Runtime::counters, "(bytes of weights, bytes of state) read so far.")
      .def("seconds", &Runtime::seconds, "Seconds spent in kernels so far.")
      .def("linear", &Runtime::linear, "matrix"_a, "norm_scale"_a, "eps"_a, "x"_a, "tokens"_a, "columns"_a, "y"_a)
      .def("embed", &Runtime::embed, "table"_a, "format"_a, "hidden"_a, "ids"_a, "tokens"_a, "x"_a)
      .def("read_memory", &Runtime::read_memory, "data"_a, "bytes"_a)
      .def("multiply", &Runtime::multiply, "rounds"_a);

  nb::class_<Step>(m, "Step")
      .def(nb::init<Runtime&, Address, std::vector<int>, int, Address, Address, Address, Address, Address, Address, Address>(),
           nb::keep_alive<1, 2>(), nb::kw_only(), "runtime"_a, "x"_a, "lengths"_a, "columns"_a, "logits"_a = 0,
           "normed"_a = 0, "ids"_a = 0, "weights"_a = 0, "gate"_a = 0, "pair_out"_a = 0, "shared_out"_a = 0)
      .def("linear_states", &Step::linear_states, "conv_in"_a, "conv_out"_a, "memory_in"_a, "memory_out"_a)
      .def("caches", &Step::caches, "keys"_a, "values"_a, "positions"_a, "cosine"_a, "sine"_a)
      .def("delta_net", &Step::delta_net, "layer"_a, "router"_a.none(), "number"_a)
      .def("attention", &Step::attention, "layer"_a, "router"_a.none(), "number"_a)
      .def("run_pairs", &Step::run_pairs, "layer"_a, "top_k"_a)
      .def("run_plan", &Step::run_plan, "layer"_a, "pairs"_a, "pair_count"_a, "chunks"_a, "chunk_count"_a, "top_k"_a,
           "with_shared"_a)
      .def("combine", &Step::combine, "top_k"_a, "hidden"_a, nb::call_guard<nb::gil_scoped_release>());
}
