// A mixture of experts: a router chooses a few gated MLPs for each row, and only the weights of chosen ones are read.
//
// Rows lie gathered by expert, so that a weight is read once for all rows that chose it. A row's results are added in the
// order of its own choices, best first: its bits do not depend on the rows beside it. The number of tasks of a phase does
// not depend on what was routed: a thread that is late for a phase asks for it when the choices are others already.
#pragma once
#include <algorithm>
#include <limits>
#include <utility>

#include "input.h"
#include "pointwise.h"

namespace sametoken {

struct Experts {
  int32_t count, chosen, width;  // experts, those that compute for a row, and the intermediate size of each
  int32_t shared;                // intermediate size of one more expert, which computes for every row; 0 for none
  int32_t normalised;            // the weights of the chosen experts sum to 1
  int32_t sigmoid;               // scores are sigmoids of logits, not shares of a softmax; only then the next four count
  int32_t groups, chosen_groups, group_best;  // equal groups, those chosen from, and how many scores make a group's own
  const float* choice_bias;      // [padded count] added to scores for the choice, null for nothing
  float weight_scale;            // of the weights
  int32_t shared_gate;           // whether the shared expert has a gate
  int32_t wide_router;           // logits stay float32, others are rounded to bfloat16
  int32_t weighted_input;        // the weight of an expert multiplies what it reads, not its result; experts are
                                 // chosen by logits, and weights are rounded to bfloat16
  Gate gate;
  Weight router;                 // an output for each expert, and one for the shared expert's gate
  const Weight *gate_up, *down;  // [count], then the shared expert's
};

// Which experts rows chose, and where their rows lie: those of an expert side by side, experts in slots.
class Choices {
 public:
  static size_t bytes(int64_t count, const Experts& shape) {
    return size_t(count * shape.chosen * 5 + 3 * int64_t(shape.count)) * 4 + 10 * 64;
  }

  Choices(char*& memory, int64_t count, const Experts& shape) : count_(shape.count), chosen_(shape.chosen) {
    take(memory, expert_, count * chosen_);
    take(memory, weight_, count * chosen_);
    take(memory, place_, count * chosen_);
    take(memory, source_, count * chosen_);
    take(memory, slot_, count * chosen_);
    take(memory, reader_, count_);
    take(memory, begin_, count_ + 1);
    take(memory, next_, count_);
    take(memory, used_, 1);
  }

  // Chooses for row t by its logits [padded count], of equal ones the first.
  void route(int t, const float* logits, const Experts& shape) const {
    thread_local Scratch scratch;
    int64_t wide = padded(count_, LANES);
    float* shares = reinterpret_cast<float*>(scratch.reserve(size_t(2 * wide) * 4));
    float* ranks = shares;
    for (int e = 0; e < count_; e += LANES) store(shares + e, load(logits + e));
    if (shape.sigmoid) rank(shares, ranks = shares + wide, shape);
    int32_t* best = expert_ + int64_t(t) * chosen_;
    choose(ranks, count_, best, chosen_);
    float total = shape.sigmoid ? 1 : exponentials(shares, count_, shares[best[0]]), part = shape.sigmoid ? 1e-20f : 0;
    for (int k = 0; k < chosen_; k++) part += shares[best[k]];
    for (int k = 0; k < chosen_; k++) {
      float weight = shares[best[k]] / (shape.normalised ? part : total) * shape.weight_scale;
      weight_[int64_t(t) * chosen_ + k] = shape.weighted_input ? to_float(to_bf16(weight)) : weight;
    }
  }

  // A row without a token chooses nobody.
  void skip(int t) const { std::fill(expert_ + int64_t(t) * chosen_, expert_ + int64_t(t + 1) * chosen_, -1); }

  // Gives a slot to each expert that the rows from `first` to `end` chose, and a place to each of their choices.
  void gather(int first, int end) const {
    int64_t from = int64_t(first) * chosen_, to = int64_t(end) * chosen_;
    std::fill(next_, next_ + count_, 0);
    for (int64_t j = from; j < to; j++)
      if (expert_[j] >= 0) next_[expert_[j]]++;
    int used = 0, rows = 0;
    for (int e = 0; e < count_; e++) {
      if (next_[e] == 0) continue;
      std::fill(slot_ + rows, slot_ + rows + next_[e], used);
      reader_[used] = e;
      begin_[used++] = rows;
      rows += std::exchange(next_[e], rows);
    }
    begin_[used] = rows;
    *used_ = used;
    for (int64_t j = from; j < to; j++) {
      if (expert_[j] < 0) continue;
      place_[j] = next_[expert_[j]]++;
      source_[place_[j]] = int32_t(j / chosen_);
    }
  }

  int used() const { return *used_; }
  int rows() const { return begin_[*used_]; }
  int reader(int slot) const { return reader_[slot]; }
  int begin(int slot) const { return begin_[slot]; }
  int size(int slot) const { return begin_[slot + 1] - begin_[slot]; }
  int slot(int row) const { return slot_[row]; }
  int source(int row) const { return source_[row]; }
  bool skipped(int t) const { return expert_[int64_t(t) * chosen_] < 0; }
  float weight(int t, int k) const { return weight_[int64_t(t) * chosen_ + k]; }
  int place(int t, int k) const { return place_[int64_t(t) * chosen_ + k]; }
  float weight_at(int place) const {
    const int32_t* places = place_ + int64_t(source(place)) * chosen_;
    return weight(source(place), int(std::find(places, places + chosen_, place) - places));
  }

 private:
  // The `most` places of the largest numbers, largest first, of equal ones the first.
  static void choose(const float* numbers, int count, int32_t* best, int most) {
    for (int e = 0; e < count; e++) {
      int at = std::min(e, most);
      for (; at > 0 && numbers[e] > numbers[best[at - 1]]; at--)
        if (at < most) best[at] = best[at - 1];
      if (at < most) best[at] = e;
    }
  }

  // Logits as scores, and what the choice goes by: less than any score outside the best groups.
  void rank(float* scores, float* ranks, const Experts& shape) const {
    for (int e = 0; e < count_; e += LANES) {
      Floats logit = load(scores + e), score = sigmoid(logit), rank = shape.weighted_input ? logit : score;
      store(scores + e, score);
      store(ranks + e, shape.choice_bias ? add(rank, load(shape.choice_bias + e)) : rank);
    }
    if (shape.groups == 1) return;
    thread_local Scratch scratch;
    int size = count_ / shape.groups, most = std::max(shape.chosen_groups, shape.group_best);
    float* group = reinterpret_cast<float*>(scratch.reserve(size_t(shape.groups + most) * 4));
    int32_t* best = reinterpret_cast<int32_t*>(group + shape.groups);
    for (int g = 0; g < shape.groups; g++) {
      choose(ranks + g * size, size, best, shape.group_best);
      group[g] = 0;
      for (int k = 0; k < shape.group_best; k++) group[g] += ranks[g * size + best[k]];
    }
    choose(group, shape.groups, best, shape.chosen_groups);
    for (int g = 0; g < shape.groups; g++)
      if (std::find(best, best + shape.chosen_groups, g) == best + shape.chosen_groups)
        std::fill(ranks + g * size, ranks + (g + 1) * size, -std::numeric_limits<float>::infinity());
  }

  int count_, chosen_;
  int32_t *expert_ = nullptr, *place_ = nullptr;                    // [rows][chosen]
  float* weight_ = nullptr;                                         // [rows][chosen]
  int32_t *source_ = nullptr, *slot_ = nullptr;                     // [places] the row, and the slot of its expert
  int32_t *reader_ = nullptr, *begin_ = nullptr, *next_ = nullptr;  // [slots] expert, first place; [experts]
  int32_t* used_ = nullptr;                                         // slots
};

// Rows at their places, in the form that the experts read.
class Gathered {
 public:
  static size_t bytes(int64_t count, int64_t width) { return Rows::bytes(count, padded(width, 128)); }

  Gathered(char*& memory, int64_t count, int64_t width) : rows_(Rows::in(memory, count, padded(width, 128))) {}

  Rows rows(const Choices& choices, int slot) const { return rows_.part(choices.begin(slot), choices.size(slot)); }

  // Puts what write(row) makes, `width` numbers, to a place.
  template <class Write>
  void set(const Choices& choices, int place, const Weight* weights, Write write) const {
    thread_local Scratch scratch;
    bf16* row = reinterpret_cast<bf16*>(scratch.reserve(size_t(rows_.width) * 3));
    int slot = choices.slot(place);
    const Weight& weight = weights[choices.reader(slot)];
    write(row);
    std::fill(row + weight.in, row + rows_.width, bf16(0));
    rows(choices, slot).set(place - choices.begin(slot), row, weight, reinterpret_cast<int8_t*>(row + rows_.width));
  }

 private:
  Rows rows_;
};

class Mixture {
 public:
  static size_t bytes(const Experts& shape, int64_t hidden, int64_t count) {
    int64_t choices = std::min<int64_t>(count, TOGETHER) * shape.chosen, numbers = count * (2 * stride_of(shape) + 2 * shape.shared + hidden);
    return Choices::bytes(count, shape) + Input::bytes(count, shape.shared) + Gathered::bytes(choices, hidden) +
           Gathered::bytes(choices, shape.width) + size_t(numbers + choices * (2 * shape.width + hidden)) * 2 + 5 * 64;
  }

  Mixture(char*& memory, const Experts& shape, int hidden, int count)
      : hidden_(hidden), count_(count), stride_(stride_of(shape)), most_(std::min(count, TOGETHER) * shape.chosen),
        choices_(memory, count, shape), shared_gated_(memory, count, shape.shared), read_(memory, most_, hidden),
        gated_(memory, most_, shape.width) {
    take(memory, logits_, count * stride_);
    take(memory, shared_gate_up_, int64_t(count) * 2 * shape.shared);
    take(memory, shared_, int64_t(count) * hidden);
    take(memory, gate_up_, most_ * 2 * shape.width);
    take(memory, results_, most_ * hidden);
  }

  static int phases(int count) { return 5 + 6 * ((count + TOGETHER - 1) / TOGETHER); }

  // Adds to rows x what the experts make of the normed rows, which are in the form that the router reads. Rows whose
  // token is negative stay as they are. A rank writes its part of that to `partial` [count][hidden], null for one rank.
  void run(Worker& worker, const Experts& experts, const Input& normed, const int64_t* tokens, bf16* x,
           float* partial) const {
    auto store_logits = into_floats(logits_, stride_, experts.router.out);
    linear(worker, experts.router, normed.rows(), [&](int row, int at, Floats value) {
      store_logits(row, at, experts.wide_router ? value : rounded(value));
    });
    worker.each(count_, [&](int t) {
      if (tokens[t] < 0) choices_.skip(t);
      else choices_.route(t, logits_ + t * stride_, experts);
      if (experts.shared) normed.finish(t, experts.gate_up[experts.count]);
    });
    if (experts.shared) share(worker, experts, normed);
    for (int first = 0; first < count_; first += TOGETHER) {
      int end = std::min(count_, first + TOGETHER), chosen = (end - first) * experts.chosen;
      worker.each(1, [&](int) { choices_.gather(first, end); });
      fill(worker, chosen, read_, experts.gate_up, [&](int place, bf16* row) {
        const bf16* from = normed.row(choices_.source(place));
        std::copy(from, from + hidden_, row);
        if (experts.weighted_input) scale_row(row, hidden_, choices_.weight_at(place));
      });
      multiply(worker, chosen, experts.count, experts.gate_up, read_, gate_up_);
      fill(worker, chosen, gated_, experts.down, [&](int place, bf16* row) {
        const bf16* gate = gate_up_ + int64_t(place) * 2 * experts.width;
        gate_row(gate, gate + experts.width, row, experts.width, experts.gate);
      });
      multiply(worker, chosen, experts.count, experts.down, gated_, results_);
      worker.each(end - first, [&](int i) {
        int64_t at = int64_t(first + i) * hidden_;
        if (partial == nullptr) return mix(experts, first + i, [&](int k, Floats sum) {
          store_bf16(x + at + k, add(load_bf16(x + at + k), rounded(sum)));
        });
        if (choices_.skipped(first + i)) std::fill(partial + at, partial + at + hidden_, 0.0f);
        mix(experts, first + i, [&](int k, Floats sum) { store(partial + at + k, sum); });
      });
    }
  }

 private:
  static constexpr int TOGETHER = 512;  // rows that are gathered at once: what they need is bounded
  static constexpr int TILES = 4;       // of a task

  static int64_t stride_of(const Experts& shape) { return padded(shape.count + 1, LANES); }

  // What the shared expert makes of all rows.
  void share(Worker& worker, const Experts& experts, const Input& normed) const {
    int width = 2 * experts.shared;
    linear(worker, experts.gate_up[experts.count], normed.rows(), into(shared_gate_up_, width, width));
    worker.each(count_, [&](int t) {
      const bf16* gate = shared_gate_up_ + int64_t(t) * width;
      gate_row(gate, gate + experts.shared, shared_gated_.row(t), experts.shared, experts.gate);
      shared_gated_.finish(t, experts.down[experts.count]);
    });
    linear(worker, experts.down[experts.count], shared_gated_.rows(), into(shared_, hidden_, hidden_));
  }

  template <class Write>
  void fill(Worker& worker, int chosen, const Gathered& rows, const Weight* weights, Write write) const {
    worker.each(chosen, [&](int place) {
      if (place < choices_.rows()) rows.set(choices_, place, weights, [&](bf16* row) { write(place, row); });
    });
  }

  // y [places][out]: rows times the weights of their experts. As many tasks as there may be slots, in parts of a few
  // tiles; those that are there are spread over all tasks.
  void multiply(Worker& worker, int chosen, int count, const Weight* weights, const Gathered& rows, bf16* y) const {
    int parts = (tiles_of(weights[0]) + TILES - 1) / TILES, tasks = std::min(count, chosen) * parts, out = weights[0].out;
    worker.each(tasks, [&](int task) {
      int64_t real = int64_t(choices_.used()) * parts;
      for (int64_t i = real * task / tasks; i < real * (task + 1) / tasks; i++) {
        int slot = int(i / parts);
        linear_part(weights[choices_.reader(slot)], rows.rows(choices_, slot), int(i % parts), parts,
                    into(y + int64_t(choices_.begin(slot)) * out, out, out));
      }
    });
  }

  // The sum of a row's results, each times its weight, handed to sink(first number, 16 values).
  template <class Take>
  void mix(const Experts& experts, int t, Take sink) const {
    if (choices_.skipped(t)) return;
    Floats gate = spread(1.0f);
    if (experts.shared_gate) gate = rounded(sigmoid(spread(logits_[t * stride_ + experts.count])));
    for (int i = 0; i < hidden_; i += LANES) {
      Floats sum = zeros();
      for (int k = 0; k < experts.chosen; k++) {
        const bf16* result = results_ + int64_t(choices_.place(t, k)) * hidden_;
        Floats weight = spread(experts.weighted_input ? 1.0f : choices_.weight(t, k));
        sum = add(sum, mul(load_bf16(result + i), weight));
      }
      if (experts.shared) sum = add(sum, rounded(mul(gate, load_bf16(shared_ + int64_t(t) * hidden_ + i))));
      sink(i, sum);
    }
  }

  int hidden_, count_;
  int64_t stride_, most_;
  Choices choices_;
  Input shared_gated_;
  Gathered read_, gated_;
  float* logits_ = nullptr;
  bf16 *shared_gate_up_ = nullptr, *shared_ = nullptr, *gate_up_ = nullptr, *results_ = nullptr;
};

}  // namespace sametoken
