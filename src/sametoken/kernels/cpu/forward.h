// One forward of a decoder, or of a head that reads hidden states beside tokens, as one team walking through all layers.
//
// Source of the architecture: `sametoken.model.decoder` and `sametoken.heads`, whose order of operations and
// rounding this follows.
#pragma once
#include <optional>

#include "attention.h"
#include "experts.h"
#include "input.h"
#include "pointwise.h"
#include "table.h"

namespace sametoken {

struct Layer {  // what a layer has not is null
  const bf16 *attention_norm, *q_norm, *k_norm, *mlp_norm;
  Weight qkv, out, gate_up, down;  // the last two empty where there are experts
  int64_t window;                  // keys that a query sees, 0 for all; of a model with chunks, their length
  const bf16* sinks;               // [heads] a score of each query head without a key
  const Experts* experts;          // in place of gate_up and down
  const bf16 *attention_out_norm, *mlp_out_norm;
  const void *cos, *sin;           // [positions][rotated] bfloat16 or float32, see Model
  const float* query_scale;        // [positions] multiplies queries
};

// How a head that reads hidden states beside tokens enters its first layer. EAGLE-3 (`paired`): `fc` mixes the target's
// features to a hidden state, and attention reads it beside a token vector, each normed. EAGLE-1: the features are
// hidden states, and `fc` makes one of each and a token vector.
struct Join {
  const Weight* fc;
  int32_t paired, normed_residual;        // whether the residual starts from the normed hidden state
  const bf16 *embed_norm, *hidden_norm;   // of the pair, or before `fc`; null for none
  const bf16 *whole_norm, *part_norms;    // of features before `fc`: over a row, over each of its parts; null for none
  int32_t parts;
  int32_t hidden_first;  // whether `fc` reads the hidden state before the token
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, head_size, rotated, intermediate, activation;
  float eps;
  int64_t vocabulary;
  const bf16* embed;    // [vocabulary][hidden], or null
  const Weight* table;  // the same, packed
  int64_t positions;  // of the layers' rotations
  const Layer* layer;
  const Join* join;  // null for a decoder, which reads tokens alone
  int32_t whole_norms, interleaved;  // q_norm and k_norm are over all heads; pairs of rotated numbers stand side by side
  float norm_shift, embed_scale, residual_scale, attention_scale, attention_cap;  // see model/config.py; 0: the usual
  int32_t chunks;        // a query sees the keys of its own chunk alone
  int32_t wide_rotation; // cos and sin are float32
  int32_t rotated_norm;  // queries and keys of rotated layers are normed after rotation, without weights
  void (*sum)(void*, float*, int64_t);  // replaces so many numbers by their sums over all ranks; null for one rank
  void* ranks;                          // the first argument of `sum`
};

struct Pages {
  char *keys, *values;  // [layers][slots][kv heads][head size] numbers or codes
  int64_t layer_stride, page_size, table_stride;
  const int64_t* table;
  float *key_scales, *value_scales;  // [layers][kv heads][slots], null for numbers
  int64_t slots;
  int32_t form;  // see kv_codes.h
};

inline void embed(const Model& model, int64_t token, bf16* x) {
  if (model.embed == nullptr) read_row(*model.table, token, x);
  else std::copy(model.embed + token * model.hidden, model.embed + (token + 1) * model.hidden, x);
}

// One forward over all layers; every thread of the team runs `run`.
class Forward {
 public:
  Forward(const Model& model, const Pages& pages, const Span* spans, int span_count, const int64_t* tokens, int count,
          bf16* x, bf16* const* taps, int threads)
      : model_(model), pages_(pages), tokens_(tokens), count_(count), x_(x),
        taps_(taps), heads_{model.heads, model.kv_heads, model.head_size, model.attention_scale, model.attention_cap}, places_(cache(0), spans, span_count),
        plan_(spans, span_count, places_, heads_, threads), parts_(parts()),
        qkv_width_((model.heads + 2 * model.kv_heads) * model.head_size), memory_(workspace()),
        joined_(memory_, count, joined_width()), normed_(memory_, count, model.hidden),
        mixed_(memory_, count, model.heads * model.head_size), gated_(memory_, count, model.intermediate),
        mixture_(mixture(memory_, model, count)) {
    take(memory_, qkv_, int64_t(count) * qkv_width_);
    take(memory_, gate_up_, int64_t(count) * 2 * model.intermediate);
    if (model.sum != nullptr) take(memory_, partial_, int64_t(count) * model.hidden);
  }

  int phases() const { return 2 + ((model_.sum != nullptr ? 20 : 14) + (mixture_ ? Mixture::phases(count_) : 0)) * model_.layers; }

  void run(Worker& worker) const {
    int hidden = model_.hidden;
    enter(worker);
    for (int i = 0; i < model_.layers; i++) {
      const Layer& layer = model_.layer[i];
      attend(worker, layer, i);
      feed_forward(worker, layer);
      if (taps_[i] != nullptr)
        worker.each(count_, [&](int t) { std::copy(state(t), state(t + 1), taps_[i] + int64_t(t) * hidden); });
    }
  }

 private:
  bf16* state(int t) const { return x_ + int64_t(t) * model_.hidden; }
  int64_t joined_width() const { return model_.join == nullptr ? 0 : 2 * int64_t(model_.hidden); }
  void embed_into(int t, bf16* row) const {
    embed(model_, std::clamp(tokens_[t], int64_t(0), model_.vocabulary - 1), row);
    if (model_.embed_scale != 1) scale_row(row, model_.hidden, model_.embed_scale);
  }

  Cache cache(int layer) const {
    int64_t offset = layer * pages_.layer_stride * kv_bytes(pages_.form), scale = layer * model_.kv_heads * pages_.slots;
    bool coded = pages_.form != KV_BF16;
    return {{pages_.keys + offset, coded ? pages_.key_scales + scale : nullptr},
            {pages_.values + offset, coded ? pages_.value_scales + scale : nullptr},
            pages_.table, pages_.table_stride, pages_.page_size, pages_.slots, pages_.form};
  }

  float* parts() const {
    thread_local Scratch scratch;
    return reinterpret_cast<float*>(scratch.reserve(size_t(plan_.parts * Attention::part_floats(model_.head_size)) * sizeof(float)));
  }

  char* workspace() const {
    thread_local Scratch scratch;
    int64_t wide = qkv_width_ + 2 * int64_t(model_.intermediate);
    const Experts* sparse = shape_of(model_);
    return scratch.reserve(Input::bytes(count_, joined_width()) + Input::bytes(count_, model_.hidden) + Input::bytes(count_, model_.heads * model_.head_size) +
                           Input::bytes(count_, model_.intermediate) + size_t(count_ * wide * 2) + 1024 +
                           (model_.sum == nullptr ? 0 : size_t(count_) * size_t(model_.hidden) * sizeof(float)) +
                           (sparse == nullptr ? 0 : Mixture::bytes(*sparse, model_.hidden, count_)));
  }

  // The experts of the first layer that has them, which all of them are like; null where there are none.
  static const Experts* shape_of(const Model& model) {
    const Layer* end = model.layer + model.layers;
    const Layer* found = std::find_if(model.layer, end, [](const Layer& each) { return each.experts != nullptr; });
    return found == end ? nullptr : found->experts;
  }

  static std::optional<Mixture> mixture(char*& memory, const Model& model, int count) {
    const Experts* shape = shape_of(model);
    return shape == nullptr ? std::nullopt : std::optional<Mixture>(std::in_place, memory, *shape, model.hidden, count);
  }

  // The first hidden states: of tokens, or of what is given in x and tokens.
  void enter(Worker& worker) const {
    int hidden = model_.hidden;
    const Join* join = model_.join;
    if (join == nullptr) return worker.each(count_, [&](int t) { embed_into(t, state(t)); });
    if (join->paired) return;
    worker.each(count_, [&](int t) {
      bf16 *first = joined_.row(t), *second = first + hidden;
      bf16 *token = join->hidden_first ? second : first, *before = join->hidden_first ? first : second;
      embed_into(t, token);
      if (join->embed_norm == nullptr) {
        std::copy(state(t), state(t) + hidden, before);
      } else {
        rms_norm(token, join->embed_norm, token, hidden, model_.eps, model_.norm_shift);
        rms_norm(state(t), join->hidden_norm, before, hidden, model_.eps, model_.norm_shift);
      }
      joined_.finish(t, *join->fc);
    });
    linear(worker, *join->fc, joined_.rows(), into(x_, hidden, hidden));
  }

  // What the first layer's attention reads where it reads tokens too.
  void pair(Worker& worker, const Join& join, const Weight& reader) const {
    int hidden = model_.hidden;
    worker.each(count_, [&](int t) {
      bf16 *token = joined_.row(t), *normed = token + hidden;
      embed_into(t, token);
      rms_norm(token, join.embed_norm, token, hidden, model_.eps, model_.norm_shift);
      rms_norm(state(t), join.hidden_norm, normed, hidden, model_.eps, model_.norm_shift);
      if (join.normed_residual) std::copy(normed, normed + hidden, state(t));
      joined_.finish(t, reader);
    });
  }

  void norm(Worker& worker, const bf16* weight, const Weight& reader) const {
    worker.each(count_, [&](int t) {
      if (weight != nullptr) rms_norm(state(t), weight, normed_.row(t), model_.hidden, model_.eps, model_.norm_shift);
      else std::copy(state(t), state(t) + model_.hidden, normed_.row(t));
      normed_.finish(t, reader);
    });
  }

  void attend(Worker& worker, const Layer& layer, int index) const {
    Cache cache = this->cache(index);
    bool paired = index == 0 && model_.join != nullptr && model_.join->paired;
    if (paired) pair(worker, *model_.join, layer.qkv);
    else norm(worker, layer.attention_norm, layer.qkv);
    linear(worker, layer.qkv, (paired ? joined_ : normed_).rows(), into(qkv_, qkv_width_, qkv_width_));
    worker.each(count_, [&](int t) { place(layer, cache, t); });
    Attention attention(cache, heads_, places_, qkv_, qkv_width_, mixed_.row(0), mixed_.stride(), layer.window,
                        model_.chunks != 0, layer.sinks, parts_, layer.qkv.matrix != 0);
    worker.each(int(plan_.tasks.size()), [&](int task) {
      thread_local Scratch scratch;
      attention(plan_.tasks[size_t(task)], scratch);
    });
    worker.each(int(plan_.joins.size()), [&](int task) { attention(plan_.joins[size_t(task)]); });
    worker.each(count_, [&](int t) { mixed_.finish(t, layer.out); });
    add_result(worker, layer.out, mixed_, layer.attention_out_norm);
  }

  // Adds what a linear makes of its rows to the hidden states, normed where there is a norm. Ranks make parts of it in
  // float32, whose sum is rounded as one rank's result is.
  void add_result(Worker& worker, const Weight& weight, const Input& input, const bf16* norm) const {
    int hidden = model_.hidden;
    float scale = model_.residual_scale;
    if (model_.sum != nullptr) {
      linear(worker, weight, input.rows(), into_floats(partial_, hidden, hidden));
      return add_sums(worker, norm);
    }
    if (norm == nullptr) return linear(worker, weight, input.rows(), onto(x_, hidden, scale));
    linear(worker, weight, input.rows(), into(normed_.row(0), normed_.stride(), hidden));
    add_rows(worker, norm);
  }

  // The same of parts that all ranks have made.
  void add_sums(Worker& worker, const bf16* norm) const {
    int hidden = model_.hidden;
    worker.each(1, [&](int) { model_.sum(model_.ranks, partial_, int64_t(count_) * hidden); });
    worker.each(count_, [&](int t) {
      for (int i = 0; i < hidden; i += LANES) store_bf16(normed_.row(t) + i, load(partial_ + int64_t(t) * hidden + i));
    });
    add_rows(worker, norm);
  }

  // The same of rows in `normed_`.
  void add_rows(Worker& worker, const bf16* norm) const {
    int hidden = model_.hidden;
    float scale = model_.residual_scale;
    worker.each(count_, [&](int t) {
      bf16* row = normed_.row(t);
      if (norm != nullptr) rms_norm(row, norm, row, hidden, model_.eps, model_.norm_shift);
      auto sink = onto(state(t), hidden, scale);
      for (int i = 0; i < hidden; i += LANES) sink(0, i, load_bf16(row + i));
    });
  }

  // Norms and rotates the queries and keys of a token, and stores its keys and values.
  void place(const Layer& layer, const Cache& cache, int t) const {
    int size = model_.head_size;
    bf16* heads = qkv_ + int64_t(t) * qkv_width_;
    int64_t position = std::min(places_.position[size_t(t)], model_.positions - 1), at = position * model_.rotated;
    auto norm = [&](const bf16* weight, bf16* row, int width) {
      if (weight != nullptr) rms_norm(row, weight, row, width, model_.eps, model_.norm_shift);
    };
    if (model_.whole_norms) {
      norm(layer.q_norm, heads, model_.heads * size);
      norm(layer.k_norm, heads + model_.heads * size, model_.kv_heads * size);
    }
    for (int h = 0; h < model_.heads + model_.kv_heads; h++) {
      bf16* row = heads + h * size;
      if (!model_.whole_norms) norm(h < model_.heads ? layer.q_norm : layer.k_norm, row, size);
      if (layer.query_scale != nullptr && h < model_.heads) scale_row(row, size, layer.query_scale[position]);
      if (layer.cos == nullptr) continue;
      auto turn = [&](auto cos, auto sin) {
        if (model_.interleaved) rotate_pairs(row, cos + at, sin + at, model_.rotated);
        else rotate(row, cos + at, sin + at, model_.rotated);
      };
      if (model_.wide_rotation) turn(static_cast<const float*>(layer.cos), static_cast<const float*>(layer.sin));
      else turn(static_cast<const bf16*>(layer.cos), static_cast<const bf16*>(layer.sin));
      if (model_.rotated_norm) rms_norm(row, nullptr, row, size, model_.eps, 0);
    }
    int64_t slot = places_.slot[size_t(t)];
    const bf16* keys = heads + model_.heads * size;
    for (int h = 0; h < model_.kv_heads; h++) {
      write(cache, heads_, cache.keys, slot, h, keys + h * size);
      write(cache, heads_, cache.values, slot, h, keys + (model_.kv_heads + h) * size);
    }
  }

  void feed_forward(Worker& worker, const Layer& layer) const {
    if (layer.experts != nullptr) {
      norm(worker, layer.mlp_norm, layer.experts->router);
      mixture_->run(worker, *layer.experts, normed_, tokens_, x_, partial_);
      if (model_.sum != nullptr) add_sums(worker, layer.mlp_out_norm);
      return;
    }
    int64_t width = 2 * int64_t(model_.intermediate);
    norm(worker, layer.mlp_norm, layer.gate_up);
    linear(worker, layer.gate_up, normed_.rows(), into(gate_up_, width, int(width)));
    worker.each(count_, [&](int t) {
      const bf16* gate = gate_up_ + t * width;
      gate_row(gate, gate + model_.intermediate, gated_.row(t), model_.intermediate, {model_.activation, 0, 0});
      gated_.finish(t, layer.down);
    });
    add_result(worker, layer.down, gated_, layer.mlp_out_norm);
  }

  const Model& model_;
  const Pages& pages_;
  const int64_t* tokens_;
  int count_;
  bf16* x_;
  bf16* const* taps_;
  Heads heads_;
  Places places_;
  Plan plan_;
  float* parts_;  // of attention, see Plan
  int qkv_width_;
  char* memory_;
  Input joined_, normed_, mixed_, gated_;
  std::optional<Mixture> mixture_;
  bf16 *qkv_ = nullptr, *gate_up_ = nullptr;
  float* partial_ = nullptr;  // results of this rank before they are summed
};

}  // namespace sametoken
