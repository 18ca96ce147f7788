// Token vectors that lie in a packed weight, which a tied head multiplies: one row of it in bfloat16.
#pragma once
#include "codes.h"

namespace sametoken {

// The code of input `i` of 32, less the code of zero; `at` is the output's first byte of the block, see blocks.h.
template <int BITS>
inline int code_of(const uint8_t* at, int i, int zero) {
  int j = i / 4, b = i % 4;
  if constexpr (BITS == 8) {
    return at[64 * j + b] - 128;  // flipped when it was packed
  } else {
    int low = at[j / 2 * 64 + b] >> (j % 2 * 4) & 15;
    if constexpr (BITS == 5) low |= (at[256 + b] >> j & 1) << 4;
    if constexpr (BITS == 6) low |= (at[256 + j / 4 * 64 + b] >> (j % 4 * 2) & 3) << 4;
    return low - zero;
  }
}

// Each number is rounded once in float32 and then to bfloat16, as `Coded.dequantize` in torch does.
template <int BITS>
void read_blocks_row(const Weight& w, int64_t row, bf16* x) {
  const Codes& codes = *codes_of(w);
  int groups = w.in / w.group, zero = zero_of(w), lane = int(row % LANES);
  const uint8_t* data = w.data + row / LANES * (padded(w.in, 128) / 32 * 64 * BITS) + 4 * lane;
  Groups read;
  for (int first = 0; first < groups; first += Groups::MOST) {
    int count = std::min(groups - first, Groups::MOST);
    read.read(codes, row / LANES, groups, first, count);
    for (int group = 0; group < count; group++) {
      float scale = read.scale[group][lane], offset = codes.offset == nullptr ? 0 : read.offset[group][lane];
      for (int i = (first + group) * w.group, end = i + w.group; i < end; i++)
        x[i] = to_bf16(float(code_of<BITS>(data + i / 32 * 64 * BITS, i % 32, zero)) * scale - offset);
    }
  }
}

// Row `row` of a weight of pairs of bfloat16 or of blocks.
inline void read_row(const Weight& w, int64_t row, bf16* x) {
  if (w.format == BF16) {
    int64_t steps = padded(w.in, 128) / 2;
    const bf16* tile = reinterpret_cast<const bf16*>(w.data) + row / LANES * steps * 2 * LANES + row % LANES * 2;
    for (int64_t k = 0; k < w.in / 2; k++) std::memcpy(x + 2 * k, tile + k * 2 * LANES, 4);
    if (w.in % 2 != 0) x[w.in - 1] = tile[w.in / 2 * 2 * LANES];
    return;
  }
  switch (w.format) {
    case BLOCK_INT4: return read_blocks_row<4>(w, row, x);
    case BLOCK_INT5: return read_blocks_row<5>(w, row, x);
    case BLOCK_INT6: return read_blocks_row<6>(w, row, x);
    default: return read_blocks_row<8>(w, row, x);
  }
}

}  // namespace sametoken
