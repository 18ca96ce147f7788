// The functions that Python calls: one linear, all blocks of a decoder, and greedy chains of a small one.
//
// One forward is one team of threads that walks through all layers. Return values: 0, or -1 when memory ran out. Source of
// the architecture: the decoders of `foretoken.model.decoder`, whose order of operations and rounding this follows.
#include <type_traits>

#include "attention.h"
#include "linear.h"
#include "pointwise.h"

using namespace foretoken;

extern "C" {

struct Layer {
  const bf16 *attention_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm null where there are none
  Weight qkv, out, gate_up, down;
  int64_t window;  // keys that a query sees, 0 for all
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, head_size, rotated, intermediate, activation;
  float eps;
  int32_t embed_packed;  // whether the table lies in BF16 tiles, so that a tied head reads it too
  int64_t vocabulary;
  const bf16 *embed, *cos, *sin;  // [vocabulary][hidden]; [positions][rotated]
  int64_t positions;
  const Layer* layer;
};

struct Pages {
  bf16 *keys, *values;  // [layers][slots][kv heads][head size]
  int64_t layer_stride, page_size, table_stride;
  const int64_t* table;
};

}  // extern "C"

namespace {

// The rows that a linear reads: plain while they are being written, then in the form that the linear wants.
class Input {
 public:
  static size_t bytes(int64_t count, int64_t width) {
    int64_t wide = padded(width, 128);
    return size_t(count * (wide * 2 + wide + wide * 2 + wide / 8 + 8)) + 6 * 64;
  }

  Input(char*& memory, int64_t count, int64_t width)
      : rows_{Blocks(int(count)), padded(width, 128), nullptr, nullptr, nullptr, nullptr} {
    auto take = [&](auto*& to, int64_t size) {
      to = reinterpret_cast<std::decay_t<decltype(to)>>(memory);
      memory += padded(size, 64);
    };
    take(plain_, count * rows_.width * 2);
    take(bytes_, count * rows_.width);
    take(rows_.words, count * rows_.width * 2);
    take(rows_.sums, count * rows_.width / 32 * 4);
    take(rows_.scale, count * 4);
    take(rows_.totals, count * 4);
    for (int64_t i = 0; i < count; i++) std::fill(row(i) + width, row(i) + rows_.width, bf16(0));
  }

  bf16* row(int64_t i) const { return plain_ + i * rows_.width; }
  int64_t stride() const { return rows_.width; }
  const Rows& rows() const { return rows_; }
  void finish(int i, const Weight& reader) const { rows_.set(i, row(i), reader, bytes_ + i * rows_.width); }

 private:
  Rows rows_;
  bf16* plain_ = nullptr;
  int8_t* bytes_ = nullptr;
};

void copy_cut(bf16* row, int at, Floats y, int size) {
  bf16 lanes[LANES];
  store_bf16(lanes, y);
  std::copy(lanes, lanes + std::min(LANES, size - at), row + at);
}

// A sink that stores bfloat16 rows of `size` numbers.
auto into(bf16* y, int64_t stride, int size) {
  return [=](int row, int at, Floats value) {
    if (at + LANES <= size) store_bf16(y + row * stride + at, value);
    else copy_cut(y + row * stride, at, value, size);
  };
}

// A sink that adds to bfloat16 rows; the product is rounded before the sum is, as separate operations would.
auto onto(bf16* x, int64_t stride) {
  return [=](int row, int at, Floats value) {
    bf16* to = x + row * stride + at;
    bf16 rounded[LANES];
    store_bf16(rounded, value);
    store_bf16(to, add(load_bf16(to), load_bf16(rounded)));
  };
}

void embed(const Model& model, int64_t token, bf16* x) {
  if (!model.embed_packed) {
    std::copy(model.embed + token * model.hidden, model.embed + (token + 1) * model.hidden, x);
    return;
  }
  int64_t steps = padded(model.hidden, 128) / 2;
  const bf16* tile = model.embed + token / LANES * steps * 2 * LANES + token % LANES * 2;
  for (int64_t k = 0; k < model.hidden / 2; k++) std::memcpy(x + 2 * k, tile + k * 2 * LANES, 4);
}

// One forward over all layers; every thread of the team runs `run`.
class Forward {
 public:
  Forward(const Model& model, const Pages& pages, const Span* spans, int span_count, const int64_t* tokens, int count,
          bf16* x, bf16* const* taps)
      : model_(model), pages_(pages), spans_(spans), span_count_(span_count), tokens_(tokens), count_(count), x_(x),
        taps_(taps), heads_{model.heads, model.kv_heads, model.head_size}, places_(cache(0), spans, span_count),
        blocks_(blocks_of(spans, span_count, places_, heads_.groups())),
        qkv_width_((model.heads + 2 * model.kv_heads) * model.head_size), memory_(workspace()),
        normed_(memory_, count, model.hidden), mixed_(memory_, count, model.heads * model.head_size),
        gated_(memory_, count, model.intermediate) {
    qkv_ = reinterpret_cast<bf16*>(memory_);
    gate_up_ = qkv_ + padded(int64_t(count) * qkv_width_, 64);
  }

  static constexpr int PHASES_PER_LAYER = 10;

  void run(Worker& worker) const {
    int hidden = model_.hidden;
    worker.each(count_, [&](int t) { embed(model_, std::clamp(tokens_[t], int64_t(0), model_.vocabulary - 1), x_ + int64_t(t) * hidden); });
    for (int i = 0; i < model_.layers; i++) {
      const Layer& layer = model_.layer[i];
      attend(worker, layer, i);
      feed_forward(worker, layer);
      if (taps_[i] != nullptr)
        worker.each(count_, [&](int t) { std::copy(x_ + int64_t(t) * hidden, x_ + int64_t(t + 1) * hidden, taps_[i] + int64_t(t) * hidden); });
    }
  }

 private:
  Cache cache(int layer) const {
    int64_t offset = layer * pages_.layer_stride;
    return {pages_.keys + offset, pages_.values + offset, pages_.table, pages_.table_stride, pages_.page_size};
  }

  char* workspace() const {
    thread_local Scratch scratch;
    int64_t wide = qkv_width_ + 2 * int64_t(model_.intermediate);
    return scratch.reserve(Input::bytes(count_, model_.hidden) + Input::bytes(count_, model_.heads * model_.head_size) +
                           Input::bytes(count_, model_.intermediate) + size_t(count_ * wide * 2) + 1024);
  }

  void norm(Worker& worker, const bf16* weight, const Weight& reader) const {
    worker.each(count_, [&](int t) {
      rms_norm(x_ + int64_t(t) * model_.hidden, weight, normed_.row(t), model_.hidden, model_.eps);
      normed_.finish(t, reader);
    });
  }

  void attend(Worker& worker, const Layer& layer, int index) const {
    Cache cache = this->cache(index);
    norm(worker, layer.attention_norm, layer.qkv);
    linear(worker, layer.qkv, normed_.rows(), into(qkv_, qkv_width_, qkv_width_));
    worker.each(count_, [&](int t) { place(layer, cache, t); });
    Attention attention(cache, heads_, places_, qkv_, qkv_width_, mixed_.row(0), mixed_.stride(), layer.window);
    worker.each(int(blocks_.size()) * model_.kv_heads, [&](int task) {
      thread_local Scratch scratch;
      attention(blocks_[size_t(task / model_.kv_heads)], task % model_.kv_heads, scratch);
    });
    worker.each(count_, [&](int t) { mixed_.finish(t, layer.out); });
    linear(worker, layer.out, mixed_.rows(), onto(x_, model_.hidden));
  }

  // Norms and rotates the queries and keys of a token, and stores its keys and values.
  void place(const Layer& layer, const Cache& cache, int t) const {
    int size = model_.head_size;
    bf16* heads = qkv_ + int64_t(t) * qkv_width_;
    int64_t at = std::min(places_.position[size_t(t)], model_.positions - 1) * model_.rotated;
    for (int h = 0; h < model_.heads + model_.kv_heads; h++) {
      const bf16* weight = h < model_.heads ? layer.q_norm : layer.k_norm;
      if (weight != nullptr) rms_norm(heads + h * size, weight, heads + h * size, size, model_.eps);
      rotate(heads + h * size, model_.cos + at, model_.sin + at, model_.rotated);
    }
    int64_t width = int64_t(model_.kv_heads) * size, to = places_.slot[size_t(t)] * width;
    const bf16* keys = heads + model_.heads * size;
    std::copy(keys, keys + width, cache.keys + to);
    std::copy(keys + width, keys + 2 * width, cache.values + to);
  }

  void feed_forward(Worker& worker, const Layer& layer) const {
    int64_t width = 2 * int64_t(model_.intermediate);
    norm(worker, layer.mlp_norm, layer.gate_up);
    linear(worker, layer.gate_up, normed_.rows(), into(gate_up_, width, int(width)));
    worker.each(count_, [&](int t) {
      const bf16* gate = gate_up_ + t * width;
      gate_row(gate, gate + model_.intermediate, gated_.row(t), model_.intermediate, model_.activation);
      gated_.finish(t, layer.down);
    });
    linear(worker, layer.down, gated_.rows(), onto(x_, model_.hidden));
  }

  const Model& model_;
  const Pages& pages_;
  const Span* spans_;
  int span_count_;
  const int64_t* tokens_;
  int count_;
  bf16* x_;
  bf16* const* taps_;
  Heads heads_;
  Places places_;
  std::vector<Block> blocks_;
  int qkv_width_;
  char* memory_;
  Input normed_, mixed_, gated_;
  bf16 *qkv_, *gate_up_;
};

// norm(x) W^T + bias for `count` rows, handed to a sink; without norm where `norm` is null.
template <class Sink>
void product(const Weight& weight, const bf16* x, int count, const bf16* norm, float eps, int threads, Sink sink) {
  thread_local Scratch scratch;
  char* memory = scratch.reserve(Input::bytes(count, weight.in));
  Input input(memory, count, weight.in);
  Pool::instance().run(threads, 2, [&](Worker& worker) {
    worker.each(count, [&](int t) {
      const bf16* row = x + int64_t(t) * weight.in;
      if (norm != nullptr) rms_norm(row, norm, input.row(t), weight.in, eps);
      else std::copy(row, row + weight.in, input.row(t));
      input.finish(t, weight);
    });
    linear(worker, weight, input.rows(), sink);
  });
}

// A sink that stores float32 rows of `size` numbers.
auto into_floats(float* y, int size) {
  return [=](int row, int at, Floats value) {
    float* to = y + int64_t(row) * size + at;
    if (at + LANES <= size) return store(to, value);
    float lanes[LANES];
    store(lanes, value);
    std::copy(lanes, lanes + (size - at), to);
  };
}

void forward(const Model& model, const Pages& pages, const Span* spans, int span_count, const int64_t* tokens, int count,
             bf16* x, bf16* const* taps, int threads) {
  Forward forward(model, pages, spans, span_count, tokens, count, x, taps);
  int phases = 1 + model.layers * (Forward::PHASES_PER_LAYER + 1);
  Pool::instance().run(threads, phases, [&](Worker& worker) { forward.run(worker); });
}

// Runs `work`; memory that ran out becomes a return value, since no exception may leave the library.
template <class Work>
int32_t guarded(Work work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace

extern "C" {

// All blocks over `count` tokens (padding is negative): x [count][hidden] becomes the last block's output, and
// taps[i], where not null, that of block i.
int32_t foretoken_forward(const Model* model, const Pages* pages, const Span* spans, int32_t span_count,
                          const int64_t* tokens, int32_t count, bf16* x, bf16* const* taps, int32_t threads) {
  return guarded([&] { forward(*model, *pages, spans, span_count, tokens, count, x, taps, threads); });
}

// y [count][out] = norm(x [count][in]) W^T + bias, in float32 (`wide`) or bfloat16; without norm where `norm` is null.
int32_t foretoken_linear(const Weight* weight, const bf16* x, int32_t count, const bf16* norm, float eps, void* y,
                         int32_t wide, int32_t threads) {
  return guarded([&] {
    int out = weight->out;
    if (wide) product(*weight, x, count, norm, eps, threads, into_floats(static_cast<float*>(y), out));
    else product(*weight, x, count, norm, eps, threads, into(static_cast<bf16*>(y), out, out));
  });
}

// Greedy continuations of `span`'s rows, one token of each at a time: tokens [levels][batch]. x [batch][hidden] is the
// last block's output for each row's last token, and is overwritten; the rows' next tokens go to index starts[b].
int32_t foretoken_chain(const Model* model, const Pages* pages, const Weight* head, const bf16* norm, const Span* span,
                        bf16* x, int64_t* tokens, int32_t levels, int32_t threads, int32_t head_threads) {
  return guarded([&] {
    int batch = span->batch, vocabulary = head->out;
    std::vector<float> logits(size_t(batch) * size_t(vocabulary));
    std::vector<int64_t> starts(span->starts, span->starts + batch);
    std::vector<uint8_t> itself(size_t(batch), 1);
    std::vector<bf16*> taps(size_t(model->layers), nullptr);
    Span next{batch, 1, 1, span->rows, starts.data(), itself.data()};
    for (int level = 0; level < levels; level++) {
      if (level > 0) {
        forward(*model, *pages, &next, 1, tokens + (level - 1) * batch, batch, x, taps.data(), threads);
        for (int64_t& start : starts) start++;
      }
      product(*head, x, batch, norm, model->eps, head_threads, into_floats(logits.data(), vocabulary));
      for (int b = 0; b < batch; b++) tokens[level * batch + b] = greatest(&logits[size_t(b) * size_t(vocabulary)], vocabulary);
    }
  });
}

}  // extern "C"
