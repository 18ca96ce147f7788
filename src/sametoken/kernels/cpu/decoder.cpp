// The functions that Python calls: one linear, the fusion of a head's features, one forward, guesses, draws, and packing.
//
// Return values: 0, or -1 when memory ran out.
#include <numeric>
#include <optional>

#include "draw.h"
#include "exchange.h"
#include "forward.h"
#include "gguf_blocks.h"
#include "grow.h"
#include "pack.h"
#include "round.h"
#include "sample.h"
#include "stop.h"

#ifdef __GLIBCXX__
// Containers call this when the size of an allocation overflows. libstdc++ has it since GCC 11: a copy of our own lets the
// kernels load beside the older libstdc++ of the systems that the wheel is tagged for.
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif

using namespace sametoken;

extern "C" {

// What makes guesses of a last hidden state.
struct Output {
  const Weight* head;
  const bf16* norm;    // before the head, null for none
  const int32_t* ids;  // [outputs, padded to whole vectors] the target's token of each output
  int32_t recycled;    // whether the next forward reads the normed state beside the guess
  float scale, cap;    // of scores: what products are multiplied by; the cap, 0 for none
  int64_t outputs;     // of all ranks together
  const int64_t* begins;  // [ranks + 1] the first output of each rank, see `gather_columns`; null for one rank
  void (*gather)(void*, const float*, const int64_t*, int64_t, int64_t, float*);  // gives all ranks all outputs
};

// What rows read before they guess: chains of committed tokens.
struct Feed {
  Span span;               // all nodes of chains, `ancestors` null
  const int64_t* tokens;   // [batch][nodes]
  const int32_t* lengths;  // [batch] tokens of each row, what follows is padding
  const bf16* features;    // [batch][nodes][width] where the model joins: what `sametoken_fuse` reads; finite in padding too
};

}  // extern "C"

namespace {

// read(x) W^T + bias for `count` rows and some tiles of W, handed to a sink; read(from, to) writes what the product reads
// of a row, and after(row), where every row is done, is a phase of its own.
template <class Read, class After>
void product(const Weight& weight, Tiles tiles, const bf16* x, int count, int threads, Read read, Sink sink, After after) {
  thread_local Scratch scratch;
  char* memory = scratch.reserve(Input::bytes(count, weight.in));
  Input input(memory, count, weight.in);
  Pool::instance().run(threads, 3, [&](Worker& worker) {
    worker.each(count, [&](int t) {
      read(x + int64_t(t) * weight.in, input.row(t));
      input.finish(t, weight);
    });
    linear(worker, weight, input.rows(), tiles, sink);
    worker.each(count, after);
  });
}

constexpr auto nothing = [](int) {};
Tiles all_of(const Weight& weight) { return {0, tiles_of(weight)}; }

// A read that norms a row of `size` numbers, or takes it as it is where `norm` is null.
auto normed(const bf16* norm, int size, float eps, float shift) {
  return [=](const bf16* from, bf16* to) {
    if (norm != nullptr) rms_norm(from, norm, to, size, eps, shift);
    else std::copy(from, from + size, to);
  };
}

void forward(const Model& model, const Pages& pages, const Span* spans, int span_count, const int64_t* tokens, int count,
             bf16* x, bf16* const* taps, int threads) {
  Forward forward(model, pages, spans, span_count, tokens, count, x, taps, threads);
  Pool::instance().run(threads, forward.phases(), [&](Worker& worker) { forward.run(worker); });
}

// Hidden states x [count][hidden] that a head reads, of the target's features.
void fuse(const Model& model, const bf16* features, int count, bf16* x, int threads) {
  const Join& join = *model.join;
  if (!join.paired) {
    std::copy(features, features + int64_t(count) * model.hidden, x);
    return;
  }
  int in = join.fc->in, size = in / join.parts;
  auto whole = normed(join.whole_norm, in, model.eps, 0);
  auto read = [&](const bf16* from, bf16* to) {
    whole(from, to);
    for (int at = 0; at < in && join.part_norms != nullptr; at += size)
      rms_norm(to + at, join.part_norms + at, to + at, size, model.eps, 0);
  };
  product(*join.fc, all_of(*join.fc), features, count, threads, read, into(x, model.hidden, model.hidden), nothing);
}

// Reads a feed; states [batch][hidden] becomes the last block's output for each row's last token.
void read(const Model& model, const Pages& pages, const Feed& feed, bf16* states, bf16* const* taps, int threads) {
  int count = feed.span.batch * feed.span.nodes, hidden = model.hidden;
  std::vector<bf16> x(size_t(count) * size_t(hidden));
  if (model.join != nullptr) fuse(model, feed.features, count, x.data(), threads);
  forward(model, pages, &feed.span, 1, feed.tokens, count, x.data(), taps, threads);
  for (int b = 0; b < feed.span.batch; b++) {
    const bf16* last = x.data() + int64_t(b * feed.span.nodes + feed.lengths[b] - 1) * hidden;
    std::copy(last, last + hidden, states + int64_t(b) * hidden);
  }
}

// A model that guesses after what it has read: its last states, and the scores of what may follow.
class Guesser {
 public:
  // Reads a feed; up to `width` nodes of each row are expanded together.
  Guesser(const Model& model, const Pages& pages, const Feed& feed, const Output& output, int width, int threads,
          int head_threads)
      : batch(feed.span.batch), model_(model), pages_(pages), feed_(feed), output_(output), threads_(threads),
        head_threads_(head_threads), stride_(padded(output.outputs, LANES)),
        states_(size_t(batch * width) * size_t(model.hidden)), taps_(size_t(model.layers), nullptr),
        logits_(size_t(batch * width * stride_)),
        own_(output.begins == nullptr ? 0 : size_t(batch * width * output.head->out)) {
    for (int b = 0; b < batch; b++) {
      tokens.push_back(feed.tokens[b * feed.span.nodes + feed.lengths[b] - 1]);
      starts.push_back(feed.span.starts[b] + feed.lengths[b]);
      places_.push_back(feed.span.rows[b]);
    }
    tokens.resize(size_t(batch * width));
    read(model, pages, feed, states_.data(), taps_.data(), threads);
  }

  // Runs `tokens`, the last nodes of a span, from the states that they follow.
  void forward(const Span& span) {
    ::forward(model_, pages_, &span, 1, tokens.data(), span.batch * span.nodes, states_.data(), taps_.data(), threads_);
  }

  // Runs the last guess of each row of a chain after the ones before it.
  void follow() {
    forward({batch, 1, 1, places_.data(), starts.data(), nullptr});
    for (int64_t& start : starts) start++;
  }

  // Leaves some of the rows `before` of the chains.
  void keep(const std::vector<int>& before, const std::vector<int>& rows) {
    size_t hidden = size_t(model_.hidden);
    for (size_t i = 0, from = 0; i < rows.size(); i++, from++) {
      while (before[from] != rows[i]) from++;
      if (from == i) continue;
      std::copy_n(&states_[from * hidden], hidden, &states_[i * hidden]);
      tokens[i] = tokens[from];
      starts[i] = starts[from];
      places_[i] = places_[from];
    }
    batch = int(rows.size());
    starts.resize(rows.size());
  }

  // Runs the frontiers of `branches` nodes, each after its parent, a node of the frontiers of `width` nodes before.
  void enter(std::vector<Tree>& trees, int width, int branches) {
    std::vector<bf16> above = states_;
    int64_t hidden = model_.hidden;
    for (int b = 0; b < batch; b++) {
      trees[size_t(b)].enter(&tokens[size_t(b * branches)]);
      for (int f = 0; f < branches; f++) {
        const bf16* from = &above[size_t((b * width + trees[size_t(b)].origin(f)) * hidden)];
        std::copy(from, from + hidden, &states_[size_t((b * branches + f) * hidden)]);
      }
    }
    int total = trees[0].entered();
    std::vector<uint8_t> ancestors(size_t(batch * total * total));
    for (int b = 0; b < batch; b++) trees[size_t(b)].ancestors(&ancestors[size_t(b * total * total)]);
    forward({batch, branches, total, feed_.span.rows, starts.data(), ancestors.data()});
  }

  // Hands `take(node, scores, ids, size)` the scores after each of `width` nodes of every row, on any thread.
  template <class Take>
  void score(int width, Take take) {
    const Weight& head = *output_.head;
    int hidden = model_.hidden;
    auto each = [&](int at) {
      bf16* state = states_.data() + int64_t(at) * hidden;
      if (output_.recycled && output_.norm != nullptr)
        rms_norm(state, output_.norm, state, hidden, model_.eps, model_.norm_shift);
      float* scores = &logits_[size_t(at * stride_)];
      for (int64_t i = 0; i < stride_ && (output_.scale != 1 || output_.cap != 0); i += LANES) {
        Floats score = mul(load(scores + i), spread(output_.scale));
        store(scores + i, output_.cap != 0 ? capped(score, output_.cap) : score);
      }
      take(at, scores, output_.ids, output_.outputs);
    };
    auto read = normed(output_.norm, hidden, model_.eps, model_.norm_shift);
    auto multiply = [&](float* y, int64_t row, auto after) {
      product(head, all_of(head), states_.data(), batch * width, head_threads_, read, into_floats(y, row, head.out), after);
    };
    if (output_.begins == nullptr) return multiply(logits_.data(), stride_, each);
    multiply(own_.data(), head.out, nothing);
    output_.gather(model_.ranks, own_.data(), output_.begins, batch * width, stride_, logits_.data());
    Pool::instance().run(head_threads_, 1, [&](Worker& worker) { worker.each(batch * width, each); });
  }

  int batch;  // rows that go on
  std::vector<int64_t> tokens, starts;  // that run next, each row's last committed one at first; lengths in the cache

 private:
  const Model& model_;
  const Pages& pages_;
  const Feed& feed_;
  const Output& output_;
  int threads_, head_threads_;
  int64_t stride_;
  std::vector<int64_t> places_;  // of the rows in the page table
  std::vector<bf16> states_;
  std::vector<bf16*> taps_;
  std::vector<float> logits_, own_;  // of all ranks, and of this one where there are more
};

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
int32_t sametoken_interface() { return 28; }

// 1 where this process may use the processor's matrix unit from now on.
int32_t sametoken_matrix() { return ask_for_matrix_unit(); }

// All blocks over `count` tokens (padding is negative): x [count][hidden] becomes the last block's output, and
// taps[i], where not null, that of block i. Where the model joins, x holds the hidden states that it reads.
int32_t sametoken_forward(const Model* model, const Pages* pages, const Span* spans, int32_t span_count,
                          const int64_t* tokens, int32_t count, bf16* x, bf16* const* taps, int32_t threads) {
  return guarded([&] { forward(*model, *pages, spans, span_count, tokens, count, x, taps, threads); });
}

// y [count][end - first] = norm(x [count][in]) W^T + bias for the outputs from `first`, where a tile begins, to `end`; in
// float32 (`wide`) or bfloat16; without norm where `norm` is null.
int32_t sametoken_linear(const Weight* weight, const bf16* x, int32_t count, const bf16* norm, float eps, float shift,
                         int32_t first, int32_t end, void* y, int32_t wide, int32_t threads) {
  return guarded([&] {
    int out = end - first;
    auto read = normed(norm, weight->in, eps, shift);
    auto multiply = [&](auto sink) {
      auto moved = [=](int row, int at, Floats values) { sink(row, at - first, values); };
      product(*weight, {first / LANES, (end + LANES - 1) / LANES}, x, count, threads, read, moved, nothing);
    };
    if (wide) multiply(into_floats(static_cast<float*>(y), out, out));
    else multiply(into(static_cast<bf16*>(y), out, out));
  });
}

// Rows of a weight into tiles; 1 where a number is not finite, of turns that look.
int32_t sametoken_pack(const Packing* packing, int32_t unit, int32_t turn, int32_t threads) {
  bool good = true;
  int32_t status = guarded([&] { good = pack(*packing, unit, Turn(turn), threads); });
  return status != 0 ? status : good ? 0 : 1;
}

// A plain weight as tiles of four-bit values with searched scales.
int32_t sametoken_round_int4(const Int4Rounding* rounding, int32_t threads) {
  return guarded([&] { round_to_int4(*rounding, threads); });
}

// Codes of AWQ's words [inputs][columns] as rows [8 * columns][inputs / 2].
int32_t sametoken_awq(const char* words, int64_t inputs, int64_t columns, uint8_t* codes, int32_t threads) {
  return guarded([&] { awq_codes(words, inputs, columns, codes, threads); });
}

// The parts of `count` blocks of llama.cpp, each kind of part into memory of its own.
int32_t sametoken_blocks(int32_t kind, const uint8_t* blocks, int64_t count, uint8_t* const* parts, int32_t threads) {
  return guarded([&] { read_blocks(kind, blocks, count, parts, threads); });
}

// Numbers of a codebook with four or eight in an entry.
int32_t sametoken_entries(const int8_t* book, int32_t width, const int32_t* entries, const int8_t* signs, const int32_t* rows,
                          int64_t count, int8_t* to, int32_t threads) {
  return guarded([&] { (width == 4 ? read_entries<4> : read_entries<8>)(book, entries, signs, rows, count, to, threads); });
}

// Codes of 5 or 6 bits, a byte each, in `groups` of 32, as blocks.h has them.
int32_t sametoken_join(const uint8_t* codes, int64_t groups, int32_t bits, uint8_t* to, int32_t threads) {
  return guarded([&] { join_bits(codes, groups, bits, to, threads); });
}

// What rows of codes mean, in bfloat16.
int32_t sametoken_numbers(const CodedRows* rows, int32_t threads) {
  return guarded([&] { read_numbers(*rows, threads); });
}

// x [count][in]: rows of a packed weight.
int32_t sametoken_rows(const Weight* weight, const int64_t* rows, int64_t count, bf16* x) {
  return guarded([&] {
    for (int64_t i = 0; i < count; i++) read_row(*weight, rows[i], x + i * weight->in);
  });
}

// 1 where float8_e4m3fn codes hold NaN.
int32_t sametoken_check_fp8(const char* codes, int64_t size, int32_t threads) {
  bool good = true;
  int32_t status = guarded([&] { good = finite_fp8(codes, size, threads); });
  return status != 0 ? status : good ? 0 : 1;
}

// x [count][hidden], the hidden states that a head reads, of the target's features: [count][in] of the fusion (EAGLE-3)
// or [count][hidden] as they are (EAGLE-1).
int32_t sametoken_fuse(const Model* model, const bf16* features, int32_t count, bf16* x, int32_t threads) {
  return guarded([&] { fuse(*model, features, count, x, threads); });
}

// Exchanges of ranks on one host, see exchange.h; a model's `sum` and an output's `gather` may be the first and the last.
void sametoken_sum(void* exchange, float* numbers, int64_t count) {
  sum_over_ranks(*static_cast<Exchange*>(exchange), numbers, count);
}

void sametoken_send(Exchange* exchange, char* data, int64_t count) { send_to_ranks(*exchange, data, count); }

void sametoken_gather(void* exchange, const float* own, const int64_t* begins, int64_t rows, int64_t stride, float* all) {
  gather_columns(*static_cast<Exchange*>(exchange), own, begins, rows, stride, all);
}

// Reads the committed tokens and guesses on: guesses [batch][1 + levels] are each row's last token and its continuation,
// drawn one token at a time; the last one of a row is not read. shares [batch][levels]: how clearly each of them won its
// draw. With `worth` rows end one by one, shares are [batch][levels][ranks] of the candidates of each draw, and guesses
// [batch][1 + most] are drafts, see stop.h. Ranks of a parallel group call it together and without `worth`, and each
// draws the same tokens.
int32_t sametoken_guess(const Model* model, const Pages* pages, const Feed* feed, const Output* output, const Draw* draw,
                        const Worth* worth, int64_t* guesses, float* shares, int32_t levels, int32_t threads,
                        int32_t head_threads) {
  return guarded([&] {
    Guesser guesser(*model, *pages, *feed, *output, 1, threads, head_threads);
    int batch = guesser.batch, ranks = worth != nullptr ? worth->ranks : 1;
    int64_t width = 1 + (worth != nullptr ? worth->most : levels);
    std::vector<int> rows(size_t(batch), 0);  // that go on
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<Drawn> found(size_t(batch * ranks));
    std::optional<Chains> chains;
    if (worth != nullptr) {
      chains.emplace(*worth, shares, batch, levels);
      std::fill(shares, shares + batch * levels * ranks, 0.0f);
    }
    for (int b = 0; b < batch; b++) guesses[b * width] = guesser.tokens[size_t(b)];
    for (int level = 0; level < levels && !rows.empty(); level++) {
      if (level > 0) guesser.follow();
      guesser.score(1, [&](int i, float* scores, const int32_t* ids, int64_t size) {
        int b = rows[size_t(i)];
        Drawn* each = &found[size_t(b * ranks)];
        drawn(scores, ids, size, *draw, b, level, ranks, each);
        guesser.tokens[size_t(i)] = ids[each->index];
        for (int64_t at = int64_t(b * levels + level) * ranks, rank = 0; rank < ranks; rank++) {
          shares[at + rank] = each[rank].share;
          if (worth == nullptr) guesses[b * width + 1 + level] = ids[each->index];
          else if (each[rank].index >= 0) worth->candidates[at + rank] = ids[each[rank].index];
        }
      });
      if (!chains) continue;
      for (int b : rows) chains->add(b);
      std::vector<int> before = rows;
      chains->go_on(rows);
      guesser.keep(before, rows);
    }
    for (int b = 0; chains && b < batch; b++) chains->draft(b, guesses + b * width);
  });
}

// The target's draws [rows][nodes] from scores [rows][nodes][size], see sample.h: each row has parameters, each node a
// position.
int32_t sametoken_sample(const Draw* draw, const float* scores, int32_t rows, int32_t nodes, int64_t size, int64_t* tokens,
                         int32_t threads) {
  return guarded([&] {
    Pool::instance().run(threads, 1, [&](Worker& worker) {
      worker.each(rows * nodes, [&](int at) {
        int64_t position = draw->seeds == nullptr ? 0 : draw->positions[at];
        tokens[at] = sampled(scores + at * size, size, *draw, at / nodes, position);
      });
    });
  });
}

// Reads the committed tokens and grows each row's tree from the last one.
int32_t sametoken_grow(const Model* model, const Pages* pages, const Feed* feed, const Output* output, const Draw* draw,
                       Growth* growth, int32_t threads, int32_t head_threads) {
  return guarded([&] {
    int branches = growth->branches;
    Guesser guesser(*model, *pages, *feed, *output, branches, threads, head_threads);
    std::vector<Tree> trees(guesser.tokens.begin(), guesser.tokens.begin() + guesser.batch);
    std::vector<Guess> guesses(size_t(guesser.batch * branches * branches));
    for (int level = 0, width = 1; level < growth->levels; level++) {
      if (level > 0) {
        guesser.enter(trees, width, branches);
        width = branches;
      }
      guesser.score(width, [&](int at, const float* scores, const int32_t* ids, int64_t size) {
        rank(scores, ids, size, *draw, at / width, level, branches, &guesses[size_t(at * branches)]);
      });
      for (int b = 0; b < guesser.batch; b++)
        trees[size_t(b)].grow(&guesses[size_t(b * width * branches)], branches, growth->limits[b] <= level);
    }
    growth->nodes = 1;
    for (int b = 0; b < guesser.batch; b++) {
      int64_t at = int64_t(b) * (1 + growth->most);
      int nodes = trees[size_t(b)].draft(growth->budgets[b], growth->most, growth->tokens + at, growth->parents + at,
                                         growth->written + at);
      growth->nodes = std::max(growth->nodes, nodes);
    }
  });
}

}  // extern "C"
