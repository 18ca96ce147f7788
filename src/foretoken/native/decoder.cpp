// The functions that Python calls: one linear, the fusion of a head's features, one forward, and chains of guesses.
//
// Return values: 0, or -1 when memory ran out.
#include "draw.h"
#include "forward.h"

using namespace foretoken;

extern "C" {

// Norms of a head's features before its fusion, each null where there is none.
struct FusionNorms {
  const bf16 *whole, *parts;  // over a row; over each of its parts, [parts][in / parts]
  int32_t count;              // of parts
  float eps;
};

// What makes guesses of a last hidden state.
struct Output {
  const Weight* head;
  const bf16* norm;    // before the head, null for none
  const int32_t* ids;  // [head->out, padded to whole vectors] the target's token of each output
  int32_t recycled;    // whether the next forward reads the normed state beside the guess
};

}  // extern "C"

namespace {

// read(x) W^T + bias for `count` rows, handed to a sink; read(from, to) writes what the product reads of a row, and
// after(row), where every row is done, is a phase of its own.
template <class Read, class Sink, class After>
void product(const Weight& weight, const bf16* x, int count, int threads, Read read, Sink sink, After after) {
  thread_local Scratch scratch;
  char* memory = scratch.reserve(Input::bytes(count, weight.in));
  Input input(memory, count, weight.in);
  Pool::instance().run(threads, 3, [&](Worker& worker) {
    worker.each(count, [&](int t) {
      read(x + int64_t(t) * weight.in, input.row(t));
      input.finish(t, weight);
    });
    linear(worker, weight, input.rows(), sink);
    worker.each(count, after);
  });
}

constexpr auto nothing = [](int) {};

// A read that norms a row of `size` numbers, or takes it as it is where `norm` is null.
auto normed(const bf16* norm, int size, float eps) {
  return [=](const bf16* from, bf16* to) {
    if (norm != nullptr) rms_norm(from, norm, to, size, eps);
    else std::copy(from, from + size, to);
  };
}

// A sink that stores float32 rows of `size` numbers.
auto into_floats(float* y, int64_t stride, int size) {
  return [=](int row, int at, Floats value) {
    float* to = y + row * stride + at;
    if (at + LANES <= size) return store(to, value);
    float lanes[LANES];
    store(lanes, value);
    std::copy(lanes, lanes + (size - at), to);
  };
}

void forward(const Model& model, const Pages& pages, const Span* spans, int span_count, const int64_t* tokens, int count,
             bf16* x, bf16* const* taps, int threads) {
  Forward forward(model, pages, spans, span_count, tokens, count, x, taps);
  Pool::instance().run(threads, forward.phases(), [&](Worker& worker) { forward.run(worker); });
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

// Which structures and calls these are; library.py takes no other.
int32_t foretoken_interface() { return 2; }

// All blocks over `count` tokens (padding is negative): x [count][hidden] becomes the last block's output, and
// taps[i], where not null, that of block i. Where the model joins, x holds the hidden states that it reads.
int32_t foretoken_forward(const Model* model, const Pages* pages, const Span* spans, int32_t span_count,
                          const int64_t* tokens, int32_t count, bf16* x, bf16* const* taps, int32_t threads) {
  return guarded([&] { forward(*model, *pages, spans, span_count, tokens, count, x, taps, threads); });
}

// y [count][out] = norm(x [count][in]) W^T + bias, in float32 (`wide`) or bfloat16; without norm where `norm` is null.
int32_t foretoken_linear(const Weight* weight, const bf16* x, int32_t count, const bf16* norm, float eps, void* y,
                         int32_t wide, int32_t threads) {
  return guarded([&] {
    int out = weight->out;
    auto read = normed(norm, weight->in, eps);
    if (wide) product(*weight, x, count, threads, read, into_floats(static_cast<float*>(y), out, out), nothing);
    else product(*weight, x, count, threads, read, into(static_cast<bf16*>(y), out, out), nothing);
  });
}

// y [count][out] = norms(x [count][in]) W^T + bias, in bfloat16.
int32_t foretoken_fuse(const Weight* weight, const bf16* x, int32_t count, const FusionNorms* norms, bf16* y,
                       int32_t threads) {
  return guarded([&] {
    int in = weight->in, size = in / norms->count;
    auto whole = normed(norms->whole, in, norms->eps);
    auto read = [&](const bf16* from, bf16* to) {
      whole(from, to);
      for (int at = 0; at < in && norms->parts != nullptr; at += size)
        rms_norm(to + at, norms->parts + at, to + at, size, norms->eps);
    };
    product(*weight, x, count, threads, read, into(y, weight->out, weight->out), nothing);
  });
}

// Continuations of `span`'s rows, one token of each at a time: tokens [levels][batch]. x [batch][hidden] is the last
// block's output for each row's last token, and is overwritten; the rows' next tokens go to index starts[b].
int32_t foretoken_chain(const Model* model, const Pages* pages, const Output* output, const Draw* draw, const Span* span,
                        bf16* x, int64_t* tokens, int32_t levels, int32_t threads, int32_t head_threads) {
  return guarded([&] {
    const Weight& head = *output->head;
    int batch = span->batch;
    int64_t stride = padded(head.out, LANES);
    std::vector<float> logits(size_t(batch * stride));
    std::vector<int64_t> starts(span->starts, span->starts + batch);
    std::vector<uint8_t> itself(size_t(batch), 1);
    std::vector<bf16*> taps(size_t(model->layers), nullptr);
    Span next{batch, 1, 1, span->rows, starts.data(), itself.data()};
    for (int level = 0; level < levels; level++, tokens += batch) {
      if (level > 0) {
        forward(*model, *pages, &next, 1, tokens - batch, batch, x, taps.data(), threads);
        for (int64_t& start : starts) start++;
      }
      auto guess = [&](int b) {
        bf16* state = x + int64_t(b) * model->hidden;
        if (output->recycled && output->norm != nullptr) rms_norm(state, output->norm, state, model->hidden, model->eps);
        tokens[b] = output->ids[drawn(&logits[size_t(b * stride)], output->ids, head.out, *draw, b, level)];
      };
      auto read = normed(output->norm, model->hidden, model->eps);
      product(head, x, batch, head_threads, read, into_floats(logits.data(), stride, head.out), guess);
    }
  });
}

}  // extern "C"
