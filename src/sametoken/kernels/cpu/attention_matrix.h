// Products of attention by the processor's matrix unit: queries with keys, and weights with values.
//
// Scores are sums over lines of 32 numbers of a head. Weights are rounded to bfloat16, and values are added up in the blocks
// of 16 keys that attention.h visits, so a query's bits depend on its own keys alone here too.
#pragma once
#include <algorithm>

#include "rows.h"
#include "simd_amx.h"

#ifdef SAMETOKEN_MATRIX_UNIT
namespace sametoken {

// Rows of a product: queries, or weights of queries. Rows lie `stride` bytes apart.
struct TileRows {
  const char* at;
  int64_t stride;
  int count;
};

// Hands use(first row, R) runs of up to 32 rows, in R blocks of 16, for which `shape` is set.
template <class Use>
inline void in_tiles(TileShape& shape, int count, int words, Use use) {
  for (int row = 0; row < count; row += 2 * LANES) {
    int left = count - row;
    shape.set(std::min(left, LANES), std::clamp(left - LANES, 1, LANES), words);
    if (left > LANES) use(row, std::integral_constant<int, 2>());
    else use(row, std::integral_constant<int, 1>());
  }
}

// Products of queries with N blocks of keys, `key_stride` words apart, as Reader::turn makes them, of `lines` lines.
// Stored at scores [N][rows][16], N blocks `score_stride` numbers apart.
template <int N>
inline void tile_scores(TileShape& shape, TileRows queries, const uint32_t* keys, int64_t key_stride, int lines,
                        float* scores, int64_t score_stride) {
  in_tiles(shape, queries.count, LANES, [&](int row, auto blocks) {
    constexpr int R = blocks();
    const char* from = queries.at + row * queries.stride;
    each_sum<R, N>([](auto at) { tile_clear<at()>(); });
    for (int line = 0; line < lines; line++, from += 64) {
      const uint32_t* key = keys + line * LANES * LANES;
      tile_load<6>(key);
      tile_load<4>(from, queries.stride);
      if constexpr (N == 2) tile_load<7>(key + key_stride);
      if constexpr (R == 2) tile_load<5>(from + LANES * queries.stride, queries.stride);
      each_sum<R, N>([](auto at) { tile_dot2<at(), 4 + at() / 2, 6 + at() % 2>(); });
    }
    each_sum<R, N>([&](auto at) { tile_store<at()>(scores + at() % 2 * score_stride + (row + at() / 2 * LANES) * LANES); });
  });
}

// Sixteen vectors of `size` numbers in pairs of two neighbours: [size / 16][8][16][2].
inline void pair_vectors(const char* const* vectors, int size, bf16* pairs) {
  constexpr int HALF = LANES * LANES;  // numbers of 16 dimensions
  for (int pair = 0; pair < LANES / 2; pair++)
    for (int i = 0; i < size; i += 2 * LANES) {
      bf16* to = pairs + i * LANES + pair * 2 * LANES;
      store_paired(vectors[2 * pair] + 2 * i, vectors[2 * pair + 1] + 2 * i, to, to + HALF);
    }
}

// Adds to sums [rows][size], `stride` numbers apart, the products of weights [blocks][rows][16] with paired values
// [blocks][size / 16][8][16][2].
inline void tile_values(TileShape& shape, const bf16* weights, int count, int64_t weight_stride, const bf16* pairs, int size,
                        int blocks, float* sums, int64_t stride) {
  constexpr int64_t ROW = 2 * LANES;  // bytes of a row's weights
  in_tiles(shape, count, LANES / 2, [&](int row, auto height) {
    constexpr int R = height();
    for (int i = 0; i < size; i += 2 * LANES) {
      float* to = sums + row * stride + i;
      auto place = [&](int at) { return to + at / 2 * LANES * stride + at % 2 * LANES; };
      each_sum<R, 2>([&](auto at) { tile_load<at()>(place(at()), 4 * stride); });
      for (int b = 0; b < blocks; b++) {
        const bf16 *from = weights + b * weight_stride + row * LANES, *value = pairs + (b * size + i) * LANES;
        tile_load<6>(value);
        tile_load<4>(from, ROW);
        tile_load<7>(value + LANES * LANES);
        if constexpr (R == 2) tile_load<5>(from + LANES * LANES, ROW);
        each_sum<R, 2>([](auto at) { tile_dot2<at(), 4 + at() / 2, 6 + at() % 2>(); });
      }
      each_sum<R, 2>([&](auto at) { tile_store<at()>(place(at()), 4 * stride); });
    }
  });
}

}  // namespace sametoken
#endif
