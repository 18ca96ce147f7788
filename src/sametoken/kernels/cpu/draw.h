// One draw from a row of scores: the greatest, or the one that the target's rule picks under the shared noise.
//
// Source of the rule and of the noise: `sametoken.speculation.sampling` and `sametoken.speculation.noise`. The hash has
// its bits; logarithms and sums of probabilities are others, so a draw differs from `sample`'s where two tokens all but tie.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>

#include "simd.h"
#include "team.h"

namespace sametoken {

// How rows draw; each column [rows], null where no row asks for it.
struct Draw {
  const int64_t *seeds, *positions;                // seeds null when all rows are greedy; positions of the first draw
  const float *temperature, *loudness, *max_cost;  // loudness: 0 for greedy rows; max_cost: -log(min-p)
  const int64_t* top_k;
  const double* top_p;
};

template <class T>
inline T column(const T* values, int row, T neutral) {
  return values == nullptr ? neutral : values[row];
}

// Index of the greatest of `size` numbers, the first of equals.
inline int64_t greatest(const float* x, int64_t size) {
  constexpr int64_t BLOCK = 16 * LANES;  // numbers among which it is looked for one by one
  int64_t whole = size / LANES * LANES, at = 0, end = 0;
  float peak = -INFINITY;
  for (int64_t begin = 0; begin < size; begin += BLOCK) {
    int64_t past = std::min(begin + BLOCK, size), full = std::min(past, whole);
    Floats most = spread(-INFINITY);
    for (int64_t i = begin; i < full; i += LANES) most = greater(most, load(x + i));
    float found = lane_max(most);
    for (int64_t i = full; i < past; i++) found = x[i] > found ? x[i] : found;
    if (found > peak || begin == 0) peak = found, at = begin, end = past;
  }
  while (at < end - 1 && x[at] != peak) at++;
  return at;
}

// -log(1 - u) for 0 < u < 1, within 3 units of the last place (Cephes logf).
inline Floats exponential_of_uniform(Floats u) {
  Ints bits = bits_of(sub(spread(1.0f), u));
  Ints power = signed_right<23>(sub_ints(bits, spread_int(0x3f3504f3)));  // of sqrt(1/2): what is left lies about 1
  Floats fraction = sub(floats_of(sub_ints(bits, left<23>(power))), spread(1.0f));
  Floats x = where_zero(power, sub(zeros(), u), fraction);  // u itself where the difference from 1 lost its bits
  Floats y = spread(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    y = fma(y, x, spread(c));
  Floats square = mul(x, x), n = as_floats(power);
  y = fma(n, spread(-2.12194440e-4f), mul(mul(y, x), square));
  y = add(fma(square, spread(-0.5f), y), x);
  return sub(zeros(), fma(n, spread(0.693359375f), y));
}

inline uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// `noise(seed, position, tokens)`.
class Noise {
 public:
  Noise(int64_t seed, int64_t position) {
    uint64_t key = mix(mix(uint64_t(seed) + GOLDEN) + uint64_t(position) * GOLDEN);
    low_ = spread_int(int32_t(uint32_t(key)));
    high_ = spread_int(int32_t(uint32_t(key >> 32)));
  }

  Floats of(Ints tokens) const {
    Ints h = exclusive_or(tokens, low_);
    h = mul_ints(exclusive_or(h, right<16>(h)), spread_int(0x7FEB352D));
    h = exclusive_or(h, high_);
    h = mul_ints(exclusive_or(h, right<15>(h)), spread_int(int32_t(0x846CA68B)));
    h = exclusive_or(h, right<16>(h));
    Floats uniform = fma(as_floats(h), spread(0x1p-32f), spread(0x1p-33f));
    return exponential_of_uniform(lesser(sub(uniform, floor_of(uniform)), spread(1.0f - 0x1p-24f)));
  }

 private:
  static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
  Ints low_, high_;
};

// The least score that min-p and top-k leave, equals of the last one included; `memory` [size] is overwritten.
inline float least_kept(const float* scores, int64_t size, float peak, float temperature, const Draw& draw, int row,
                        float* memory) {
  float least = peak - column(draw.max_cost, row, INFINITY) * temperature;
  int64_t count = column(draw.top_k, row, size);
  if (count >= size) return least;
  std::copy(scores, scores + size, memory);
  std::nth_element(memory, memory + count - 1, memory + size, std::greater<float>());
  return std::max(least, memory[count - 1]);
}

// Sum of the weights above `floor`; padded to whole vectors with zeros.
inline float mass_above(const float* weights, int64_t size, float floor) {
  Floats sum = zeros();
  for (int64_t i = 0; i < size; i += LANES) {
    Floats weight = load(weights + i);
    sum = add(sum, where_less(spread(floor), weight, weight, zeros()));
  }
  return lane_sum(sum);
}

// Share that the greatest of the scores has in the sum of their exponentials.
inline float greatest_share(const float* scores, int64_t size, float peak) {
  Floats sum = zeros();
  int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) sum = add(sum, exponential(sub(load(scores + i), spread(peak))));
  float total = lane_sum(sum);
  for (int64_t i = whole; i < size; i++) total += std::exp(scores[i] - peak);
  return 1 / total;
}

// A draw, and how clearly it won: the share of its p / E in the sum over all tokens, with E = 1 for greedy rows.
struct Drawn {
  int64_t index;  // -1 where there is none
  float share;
};

// The `count` tokens that come first in the draw that comes `later` than the first one of row `row`, the draw itself
// first. Scores, of which those found are lost, and `ids`, the numbers of their tokens, are readable up to whole vectors.
inline void drawn(float* scores, const int32_t* ids, int64_t size, const Draw& draw, int row, int64_t later, int count,
                  Drawn* found) {
  int64_t best = greatest(scores, size), stride = (size + LANES - 1) / LANES * LANES;
  float top = scores[best];
  if (draw.seeds == nullptr || column(draw.loudness, row, 1.0f) == 0) {
    float share = greatest_share(scores, size, top);
    found[0] = {best, share};
    for (int n = 1; n < count; n++) {
      scores[best] = -INFINITY;
      best = greatest(scores, size);
      float other = share * std::exp(scores[best] - top);
      found[n] = other > 0 ? Drawn{best, other} : Drawn{-1, 0};
    }
    return;
  }
  thread_local Scratch scratch;
  float* race = reinterpret_cast<float*>(scratch.reserve(size_t(stride) * 8));
  float* weights = race + stride;
  float temperature = column(draw.temperature, row, 1.0f);
  Floats least = spread(least_kept(scores, size, top, temperature, draw, row, race));
  Floats peak = spread(top), sharpness = spread(1.0f / temperature);
  Noise noise(draw.seeds[row], draw.positions[row] + later);
  for (int64_t i = 0; i < size; i += LANES) {  // argmax(p / E) as the greatest of -E / p, p up to a factor
    Floats score = load(scores + i), weight = exponential(mul(sub(score, peak), sharpness));
    Floats luck = sub(zeros(), divide(noise.of(load_ints(ids + i)), weight));
    store(race + i, where_less(score, least, spread(-INFINITY), luck));
    store(weights + i, where_less(score, least, zeros(), weight));
  }
  std::fill(weights + size, weights + stride, 0.0f);
  std::fill(race + size, race + stride, -INFINITY);
  float nucleus = float(column(draw.top_p, row, 1.0));
  // Never 0, which a tiny nucleus rounds to: no token would reach it, and the search would not end.
  float wanted = std::max(nucleus * mass_above(weights, size, 0), 1e-30f);
  auto next = [&] {  // the greatest of the race that is in the nucleus, whose best token always is
    int64_t at = greatest(race, size);
    while (nucleus < 1 && race[at] > -INFINITY && mass_above(weights, size, weights[at]) >= wanted) {
      race[at] = -INFINITY;
      at = greatest(race, size);
    }
    return at;
  };
  best = next();
  // The race holds -E / p, so p / E is -1 / race, and 0 where a token may not be drawn.
  float won = race[best];
  Floats sum = zeros(), winner = spread(won);
  for (int64_t i = 0; i < size; i += LANES) sum = add(sum, divide(winner, load(race + i)));
  float share = 1 / lane_sum(sum);
  found[0] = {best, share};
  for (int n = 1; n < count; n++) {
    race[best] = -INFINITY;
    best = next();
    found[n] = race[best] > -INFINITY ? Drawn{best, share * (won / race[best])} : Drawn{-1, 0};
  }
}

}  // namespace sametoken
