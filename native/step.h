// One forward: the runtime that owns a pool of threads, the layers of a model, and a step through them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "isa.h"

namespace huorn {

namespace nb = nanobind;

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

  bool code_rows(Address weight, int rows, int cols, Address codes, Address scale, Address spread) {
    nb::gil_scoped_release release;
    return kernels_->code_rows(*pool_, at<uint8_t>(weight), rows, cols, at<int8_t>(codes), at<float>(scale), at<float>(spread));
  }

  void bound_rows(const CodedRows& w, Address norm_scale, float eps, Address x, int tokens, Address lower, Address upper) {
    nb::gil_scoped_release release;
    kernels_->bound_rows(*pool_, w, at<float>(norm_scale), eps, at<float>(x), tokens, at<float>(lower), at<float>(upper));
  }

  void score_heads(const PredictorBank& bank, int first, int heads, Address x, int features, Address base, Address work,
                   Address scores, Address probabilities) {
    nb::gil_scoped_release release;
    kernels_->score_heads(*pool_, bank, first, heads, at<uint8_t>(x), features, at<uint8_t>(base), at<float>(work),
                          at<float>(scores), at<float>(probabilities));
  }

  // previous 0 for none.
  void head_features(const HeadFeatures& what, Address hidden, Address logits, Address routed, Address previous, Address prior,
                     Address token, Address next_token, float position, Address x, Address base) {
    nb::gil_scoped_release release;
    DecodedToken seen{at<float>(hidden), at<float>(logits), at<int32_t>(routed), at<int32_t>(previous), at<float>(prior),
                      at<uint8_t>(token), at<uint8_t>(next_token), position};
    kernels_->head_features(*pool_, what, seen, at<uint8_t>(x), at<uint8_t>(base));
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

// The layers of a model in their order, each with what a step runs for it.
struct Layer {
  bool linear;
  int state;  // which of the linear, or of the full layers
  DeltaNet delta_net;
  Attention attention;
  Router router;
  ExpertLayer experts;
};
struct Layers {
  std::vector<Layer> all;
  int linear = 0, full = 0;

  void add_delta_net(const DeltaNet& mixer, const Router& router, const ExpertLayer& experts) {
    all.push_back({true, linear++, mixer, {}, router, experts});
  }
  void add_attention(const Attention& mixer, const Router& router, const ExpertLayer& experts) {
    all.push_back({false, full++, {}, mixer, router, experts});
  }
};

// One forward over some sequences: what its kernel calls share, so that Python hands over little per layer. Between two calls
// the weights of a layer have pushed Python out of the caches, and every object it touches then costs a trip to RAM.
class Step {
 public:
  Step(Runtime& runtime, Address x, std::vector<int> lengths, int columns, Address logits, Address normed, Address ids,
       Address weights, Address gate, Address pair_out, Address shared_out, Address routed, Address kept_normed,
       Address kept_logits)
      : runtime_(runtime), lengths_(std::move(lengths)), logits_(at<float>(logits)), normed_(at<float>(normed)),
        ids_(at<int32_t>(ids)), weights_(at<float>(weights)), gate_(at<float>(gate)), pair_out_(at<float>(pair_out)),
        shared_out_(at<float>(shared_out)), routed_(at<int32_t>(routed)), kept_normed_(at<float>(kept_normed)),
        kept_logits_(at<float>(kept_logits)) {
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

  // What the next layer's router makes of a layer's input goes to ids [layers, tokens, top_k]: at most what it will choose.
  void look_ahead(Address ids) { ahead_ = at<int32_t>(ids); }

  // Layers from number `first` on, each token's pairs one by one (no packing), as long as all experts that a router chose are
  // ready, and those it is said to choose next. The number of the first layer where one is not, its mixer and router done, or how
  // many layers there are. Of every layer what its router chose is written to routed [layers, tokens, top_k], what it read and made
  // to kept_normed [layers, tokens, hidden] and kept_logits [layers, tokens, experts]. One call for the whole model: between two
  // calls its weights have pushed Python out of the caches, and 40 us per layer were lost to that.
  int run(const Layers& layers, int first) {
    nb::gil_scoped_release release;
    int count = static_cast<int>(layers.all.size());
    for (int number = first; number < count; ++number) {
      const Layer& layer = layers.all[static_cast<size_t>(number)];
      size_t state = static_cast<size_t>(layer.state) * lengths_.size();
      if (layer.linear) {
        runtime_.kernels_->delta_net(*runtime_.pool_, layer.delta_net, batch_, &linear_.at(state));
      } else {
        runtime_.kernels_->attention(*runtime_.pool_, layer.attention, batch_, &caches_.at(state), cosine_, sine_);
      }
      size_t place = static_cast<size_t>(number) * static_cast<size_t>(batch_.tokens);
      normed_ = kept_normed_ + place * static_cast<size_t>(layer.router.hidden);
      logits_ = kept_logits_ + place * static_cast<size_t>(layer.router.experts);
      route(layer.router);
      size_t chosen = static_cast<size_t>(batch_.tokens) * static_cast<size_t>(layer.router.top_k);
      std::copy_n(ids_, chosen, routed_ + chosen * static_cast<size_t>(number));
      bool all = ready(layer, ids_);
      if (ahead_ != nullptr && number + 1 < count) {
        const Layer& next = layers.all[static_cast<size_t>(number) + 1];
        int32_t* said = ahead_ + chosen * static_cast<size_t>(number);
        guess(next.router, said);
        all = all && ready(next, said);
      }
      if (!all) return number;
      run_pairs(layer.experts, layer.router.top_k);
    }
    return count;
  }

  // Of a layer at which `run` came back: its pairs whose experts are ready and that have not been run, one by one, and with the
  // first call the shared expert. How many pairs are left; with none x has the layer's sum. In place of run_plan and combine, since
  // plans in Python cost a token 0.3 ms a layer here.
  int run_ready(const Layers& layers, int number) {
    nb::gil_scoped_release release;
    const Layer& layer = layers.all.at(static_cast<size_t>(number));
    size_t pairs = static_cast<size_t>(batch_.tokens) * static_cast<size_t>(layer.router.top_k);
    bool first = begun_ != number;
    if (first) done_.assign(pairs, 0);
    begun_ = number;
    some_.clear();
    chunks_.clear();
    int left = 0;
    for (size_t i = 0; i < pairs; ++i) {
      if (done_[i] != 0) continue;
      if (layer.experts.experts[ids_[i]].gate == nullptr) {
        ++left;
        continue;
      }
      chunks_.push_back({ids_[i], static_cast<int32_t>(some_.size()), 1});
      some_.push_back(static_cast<int32_t>(i));
      done_[i] = 1;
    }
    int count = static_cast<int>(some_.size());
    if (first || count > 0)
      runtime_.kernels_->run_plan(*runtime_.pool_, layer.experts, normed_, batch_.tokens, layer.router.top_k, some_.data(), count,
                                  chunks_.data(), count, first, batch_.columns, pair_out_, shared_out_);
    if (left == 0) {
      begun_ = -1;
      combine(layer.router.top_k, layer.experts.hidden);
    }
    return left;
  }

  void combine(int top_k, int hidden) {
    runtime_.kernels_->combine(*runtime_.pool_, batch_.x, pair_out_, weights_, shared_out_, gate_, batch_.tokens, top_k, hidden);
  }

 private:
  bool ready(const Layer& layer, const int32_t* ids) const {
    for (int i = 0; i < batch_.tokens * layer.router.top_k; ++i)
      if (layer.experts.experts[ids[i]].gate == nullptr) return false;
    return true;
  }

  // What a later router makes of the present layer's input.
  void guess(const Router& router, int32_t* ids) {
    size_t tokens = static_cast<size_t>(batch_.tokens), hidden = static_cast<size_t>(router.hidden);
    size_t experts = static_cast<size_t>(router.experts), top_k = static_cast<size_t>(router.top_k);
    guess_.resize(tokens * (hidden + experts + top_k + 1));
    float *normed = guess_.data(), *logits = normed + tokens * hidden, *weights = logits + tokens * experts;
    runtime_.kernels_->route(*runtime_.pool_, router, batch_, logits, normed, ids, weights, weights + tokens * top_k);
  }

  // The per-pair route and the sum: every pair alone, in the order of tokens and ranks.
  void run_pairs(const ExpertLayer& layer, int top_k) {
    int pairs = batch_.tokens * top_k;
    while (static_cast<int>(order_.size()) < pairs) order_.push_back(static_cast<int32_t>(order_.size()));
    chunks_.resize(static_cast<size_t>(pairs));
    for (int i = 0; i < pairs; ++i) chunks_[static_cast<size_t>(i)] = {ids_[i], i, 1};
    runtime_.kernels_->run_plan(*runtime_.pool_, layer, normed_, batch_.tokens, top_k, order_.data(), pairs, chunks_.data(), pairs,
                                true, batch_.columns, pair_out_, shared_out_);
    combine(top_k, layer.hidden);
  }

  Runtime& runtime_;
  std::vector<int> lengths_;
  Batch batch_{};
  std::vector<LinearState> linear_;
  std::vector<KeyValueCache> caches_;
  std::vector<int32_t> order_, some_;
  std::vector<Chunk> chunks_;
  std::vector<uint8_t> done_;
  int begun_ = -1;  // the layer of which run_ready has run a part
  const float* cosine_ = nullptr;
  const float* sine_ = nullptr;
  float* logits_;
  float* normed_;
  int32_t* ids_;
  float* weights_;
  float* gate_;
  float* pair_out_;
  float* shared_out_;
  int32_t* routed_;
  float* kept_normed_;
  float* kept_logits_;
  int32_t* ahead_ = nullptr;
  std::vector<float> guess_;
};

}  // namespace huorn
