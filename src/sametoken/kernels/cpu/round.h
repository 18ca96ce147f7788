// Rounding of a plain weight to four-bit values with a searched scale for each group of inputs, in the layout of linear.h.
//
// The lanes are the 16 outputs of a tile: a group's search needs no step across lanes. Errors are added in eight running
// sums, then by halves; model/formats/search.py adds them in this order too.
#pragma once
#include "rows.h"
#include "team.h"

namespace sametoken {

struct Int4Rounding {
  const bf16* weight;       // [outputs][inputs], rows `stride` numbers apart
  int64_t outputs, inputs, stride, units;  // `units` of eight inputs, with padding
  int32_t group, count;     // inputs of a scale, at most 128 and a multiple of 8; number of factors
  const float* factors;     // tried scales, relative to the one that maps the greatest weight to -8
  uint32_t* data;           // [tile][units][16]
  bf16* scale;              // [tile][group of inputs][16]
};

// Numbers of the inputs from `begin` on, [group][16]; zeros outside the weight.
inline void load_group(const Int4Rounding& r, int64_t tile, int64_t begin, float (*x)[LANES]) {
  alignas(64) float block[LANES][LANES];
  for (int at = 0; at < r.group; at += LANES) {
    int64_t left = std::min<int64_t>(LANES, r.inputs - begin - at);
    for (int lane = 0; lane < LANES; lane++) {
      int64_t row = tile * LANES + lane;
      const bf16* from = r.weight + row * r.stride + begin + at;
      bf16 part[LANES] = {};
      if (row < r.outputs && left > 0) std::memcpy(part, from, size_t(left) * sizeof(bf16));
      store(block[lane], load_bf16(part));
    }
    for (int i = 0; i < LANES; i += 4)
      for (int lane = 0; lane < LANES; lane += 4) transpose4(&block[lane][i], LANES, &x[at + i][lane], LANES);
  }
}

inline Floats divisor(Floats scale) { return where_zero(left<1>(bits_of(scale)), spread(1.0f), scale); }

inline Floats rounded_to_int4(Floats x, Floats by) {
  return lesser(greater(nearest(divide(x, by)), spread(-8.0f)), spread(7.0f));
}

inline Floats rounded_to_bf16(Floats x) {
  bf16 lanes[LANES];
  store_bf16(lanes, x);
  return load_bf16(lanes);
}

// Scale of least squared error of each lane, the first of equal ones.
inline Floats searched_scale(const Int4Rounding& r, const float (*x)[LANES]) {
  Floats most = zeros(), greatest = zeros();
  for (int i = 0; i < r.group; i++) {
    Floats value = load(x[i]), size = magnitude(value);
    greatest = where_less(most, size, value, greatest), most = greater(most, size);
  }
  Floats whole = divide(greatest, spread(-8.0f)), found = zeros(), best = spread(std::numeric_limits<float>::infinity());
  for (int tried = 0; tried < r.count; tried++) {
    Floats scale = rounded_to_bf16(mul(whole, spread(r.factors[tried]))), by = divisor(scale), sums[8];
    for (Floats& sum : sums) sum = zeros();
    for (int i = 0; i < r.group; i += 8)
      UNROLLED for (int j = 0; j < 8; j++) {
        Floats value = load(x[i + j]), error = sub(mul(rounded_to_int4(value, by), scale), value);
        sums[j] = add(sums[j], mul(error, error));
      }
    for (int width = 4; width > 0; width /= 2)
      for (int j = 0; j < width; j++) sums[j] = add(sums[j], sums[j + width]);
    found = where_less(sums[0], best, scale, found), best = where_less(sums[0], best, sums[0], best);
  }
  return found;
}

inline void round_tile(const Int4Rounding& r, int64_t tile) {
  alignas(64) float x[128][LANES];
  int64_t groups = r.units * 8 / r.group;
  for (int64_t group = 0; group < groups; group++) {
    load_group(r, tile, group * r.group, x);
    Floats scale = searched_scale(r, x), by = divisor(scale);
    store_bf16(r.scale + (tile * groups + group) * LANES, scale);
    auto code = [&](int i) {  // 0 .. 15
      constexpr int32_t WHOLE = 0x4b000000;  // bits of 2^23, whose last place is 1
      return sub_ints(bits_of(add(rounded_to_int4(load(x[i]), by), spread(8388616.0f))), spread_int(WHOLE));
    };
    uint32_t* to = r.data + (tile * r.units + group * r.group / 8) * LANES;
    for (int i = 0; i < r.group; i += 8, to += LANES) {
      Ints low = add_ints(add_ints(code(i), left<8>(code(i + 1))), add_ints(left<16>(code(i + 2)), left<24>(code(i + 3))));
      Ints high = add_ints(add_ints(code(i + 4), left<8>(code(i + 5))), add_ints(left<16>(code(i + 6)), left<24>(code(i + 7))));
      store(reinterpret_cast<float*>(to), floats_of(add_ints(low, left<4>(high))));
    }
  }
}

inline void round_to_int4(const Int4Rounding& r, int threads) {
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int((r.outputs + LANES - 1) / LANES), [&](int tile) { round_tile(r, tile); });
  });
}

}  // namespace sametoken
