// The target's draw from a row of scores: that of `sametoken.speculation.sampling.sample`, or UNSURE.
//
// Gaps, costs, the hash and ranks have torch's bits; exponentials, logarithms and sums of probabilities lie within a tenth
// of MARGIN of torch's, relative to the winner's and to the whole. So a winner by MARGIN that is inside or outside of the
// nucleus by MARGIN is torch's too. Otherwise, and for scores that are not numbers, the answer is UNSURE and torch decides.
#pragma once
#include "draw.h"

namespace sametoken {

constexpr int64_t UNSURE = -2;
constexpr float MARGIN = 0x1p-14f;

struct Ahead {
  int64_t count;
  double mass;
};

// The tokens whose gap is less than `limit`, and the sum of their weights: floats only within short blocks.
inline Ahead ahead_of(float limit, const float* gaps, const float* weights, int64_t stride) {
  constexpr int64_t BLOCK = 64 * LANES;
  Ahead found{0, 0};
  for (int64_t begin = 0; begin < stride; begin += BLOCK) {
    Floats count = zeros(), mass = zeros();
    for (int64_t i = begin; i < std::min(stride, begin + BLOCK); i += LANES) {
      Floats gap = load(gaps + i);
      count = add(count, where_less(gap, spread(limit), spread(1.0f), zeros()));
      mass = add(mass, where_less(gap, spread(limit), load(weights + i), zeros()));
    }
    found.count += int64_t(lane_sum(count));
    found.mass += lane_sum(mass);
  }
  return found;
}

// The sum of the weights of the `kept` tokens of least gap; `memory` [size] is overwritten.
inline double mass_of_least(int64_t kept, const float* gaps, const float* weights, int64_t size, int64_t stride,
                            float* memory) {
  if (kept >= size) return ahead_of(INFINITY, gaps, weights, stride).mass;
  float limit = 1;
  while (limit < INFINITY && ahead_of(limit, gaps, weights, stride).count < kept) limit *= 4 * limit;
  float* end = std::copy_if(gaps, gaps + size, memory, [=](float gap) { return gap < limit; });
  if (end - memory > kept) std::nth_element(memory, memory + kept, end), limit = memory[kept];
  Ahead inside = ahead_of(limit, gaps, weights, stride);
  if (inside.count >= kept || limit == INFINITY) return inside.mass;
  return inside.mass + double(kept - inside.count) * weights[std::find(gaps, gaps + size, limit) - gaps];
}

// The draw at `position` of row `row` of a batch.
inline int64_t sampled(const float* scores, int64_t size, const Draw& draw, int row, int64_t position) {
  thread_local Scratch scratch;
  int64_t stride = (size + LANES - 1) / LANES * LANES;
  float* gaps = reinterpret_cast<float*>(scratch.reserve(size_t(stride) * 16));
  float *weights = gaps + stride, *race = weights + stride, *memory = race + stride;
  std::copy(scores, scores + size, gaps);
  std::fill(gaps + size, gaps + stride, -INFINITY);
  Floats most = spread(-INFINITY), absurd = zeros();  // NaN is not less than infinity either
  for (int64_t i = 0; i < stride; i += LANES) {
    most = greater(most, load(gaps + i));
    absurd = add(absurd, where_less(load(gaps + i), spread(INFINITY), zeros(), spread(1.0f)));
  }
  float peak = lane_max(most);
  if (lane_sum(absurd) > 0 || peak == -INFINITY) return UNSURE;
  if (draw.seeds == nullptr || column(draw.loudness, row, 1.0f) == 0) return std::find(gaps, gaps + size, peak) - gaps;

  Floats temperature = spread(column(draw.temperature, row, 1.0f)), dearest = spread(column(draw.max_cost, row, INFINITY));
  Noise noise(draw.seeds[row], position);
  int32_t first[LANES];
  for (int i = 0; i < LANES; i++) first[i] = i;
  Ints ids = load_ints(first);
  for (int64_t i = 0; i < stride; i += LANES, ids = add_ints(ids, spread_int(LANES))) {
    Floats gap = sub(spread(peak), load(gaps + i)), cost = divide(gap, temperature);
    Floats weight = where_less(dearest, cost, zeros(), exponential(sub(zeros(), cost)));
    store(gaps + i, gap);
    store(weights + i, weight);
    store(race + i, divide(weight, noise.of(ids)));
  }
  int64_t kept = column(draw.top_k, row, size);
  double nucleus = column(draw.top_p, row, 1.0), wanted = -1;
  for (;;) {
    int64_t best = greatest(race, stride);
    float won = race[best], gap = gaps[best];
    race[best] = 0;
    if (race[greatest(race, stride)] >= won * (1 - MARGIN)) return UNSURE;
    if (kept >= size && nucleus >= 1) return best;
    Ahead ahead = ahead_of(gap, gaps, weights, stride);
    int64_t equals = std::count(gaps, gaps + best, gap);
    ahead.count += equals;
    ahead.mass += double(equals) * weights[best];
    if (ahead.count == 0) return best;
    if (ahead.count < kept) {
      if (nucleus >= 1) return best;
      if (wanted < 0) wanted = mass_of_least(kept, gaps, weights, size, stride, memory);
      double over = ahead.mass - nucleus * wanted, margin = MARGIN * wanted;
      if (over < -margin) return best;
      if (over < margin) return UNSURE;
    }
    for (int64_t i = 0; i < stride; i += LANES)  // what comes after a token that was dropped is dropped too
      store(race + i, where_less(spread(gap), load(gaps + i), zeros(), load(race + i)));
  }
}

}  // namespace sametoken
