// Products of integer codes with rows in bytes, 32 of which share a scale: the arithmetic of llama.cpp, whose files these are.
//
// A weight lies in tiles of 16 outputs, and within a tile in blocks of 32 inputs: steps of 64 bytes with the low four bits
// of eight inputs each, then their upper bits, see Block. A group of 16 or 32 inputs is an integer; groups are added in
// float32 in the order of the inputs, each times the scales of its weights and of its rows. Every operation is rounded
// alone, so that all sets of instructions and plain torch give the same bits.
#pragma once
#include "codes.h"

namespace sametoken {

// Input 4 J + b of 32 in byte b of each lane, where codes have BITS bits. In four bits: byte b of step u holds inputs
// 8 u + b, low, and 8 u + 4 + b. In more: the bits above of input 4 J + b lie in byte b of one step that follows (five
// bits; at bit J), or of step J / 4 of two that follow (six; at bits 2 (J % 4)). In eight: byte b of step J.
template <int BITS, int J>
inline Quads block_quad(const uint8_t* at) {
  if constexpr (BITS == 8) {
    return load_int8(at + 64 * J);
  } else {
    Quads both = load_quads(at + J / 2 * 64), low = J % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
    if constexpr (BITS == 4) return low;
    else if constexpr (BITS == 5) return insert_bits<4 - J>(low, load_quads(at + 256), 0x10);
    else return insert_bits<4 - J % 4 * 2>(low, load_quads(at + 256 + J / 4 * 64), 0x30);
  }
}

template <int BITS, int GROUP>
struct BlockKernel {
  static constexpr int BYTES = 64 * BITS;      // of a tile's block
  static constexpr int PARTS = 32 / GROUP;     // groups of a block
  // Each tile is a stream from memory: several at once cost more than the rows' loads that they save.
  static constexpr int together(int) { return 1; }

  template <int M, int N>
  static void tile(const Weight& w, const Rows& rows, int row, int tile, Floats (&out)[M][N]) {
    const Codes& codes = *codes_of(w);
    int groups = w.in / GROUP;
    int64_t size = padded(w.in, 128) / 32 * BYTES;
    Lead lead(size, BYTES, N);
    const uint8_t* data = w.data + tile * size;
    const uint32_t* x = rows.block(row, w);
    const float *scale = rows.scale + row * (rows.width / 32), *minus = rows.minus + row * (rows.width / LANES);
    const int32_t* start = rows.sums + row * (rows.width / LANES);
    Groups read[N];
    Floats total[M][N];  // not `out`, which others could see, so that it stays in registers
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) total[m][n] = zeros();
    for (int group = 0; group < groups; group += PARTS, data += BYTES, x += 8 * WORDS * M, scale += M) {
      if (group % Groups::MOST == 0)
        UNROLLED for (int n = 0; n < N; n++) read[n].read(codes, tile + n, groups, group, std::min(groups - group, Groups::MOST));
      int64_t ahead = lead.at(group / PARTS);
      UNROLLED for (int n = 0; n < N; n++)
        for (int line = 0; line < BITS; line++) fetch(data + n * size + ahead + 64 * line);
      part<M, N, 0>(read, group % Groups::MOST, codes.offset != nullptr, data, size, x, start, scale, minus, total);
    }
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) out[m][n] = total[m][n];
  }

 private:
  static constexpr int WORDS = BITS == 8 ? SPLIT_WORDS : 1;  // of a quad of a row

  template <int M>
  static auto input_quad(const uint32_t* x, int j) {
    if constexpr (BITS == 8) return spread_split(x + j * WORDS * M, M);
    else return spread_quad(x[j * M]);
  }

  // Adds the groups of a block from PART on; `at` is the first one's place in `read`.
  template <int M, int N, int PART>
  static void part(const Groups (&read)[N], int at, bool offsets, const uint8_t* data, int64_t size, const uint32_t* x,
                   const int32_t*& start, const float* scale, const float*& minus, Floats (&total)[M][N]) {
    if constexpr (PART < PARTS) {
      Ints sums[M][N];
      UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int n = 0; n < N; n++) sums[m][n] = spread_int(start[m]);
      quads<M, N, PART * GROUP / 4, (PART + 1) * GROUP / 4>(data, size, x, sums);
      UNROLLED for (int n = 0; n < N; n++) {
        Floats weights = load(read[n].scale[at + PART]);
        UNROLLED for (int m = 0; m < M; m++)
          total[m][n] = add(total[m][n], mul(mul(as_floats(sums[m][n]), weights), spread(scale[m])));
      }
      if (offsets)
        UNROLLED for (int n = 0; n < N; n++) {
          Floats offset = load(read[n].offset[at + PART]);
          UNROLLED for (int m = 0; m < M; m++) total[m][n] = add(total[m][n], mul(offset, spread(minus[m])));
        }
      start += M, minus += M;
      part<M, N, PART + 1>(read, at, offsets, data, size, x, start, scale, minus, total);
    }
  }

  template <int M, int N, int J, int END>
  static void quads(const uint8_t* data, int64_t size, const uint32_t* x, Ints (&sums)[M][N]) {
    if constexpr (J < END) {
      constexpr int STOP = std::min(END, J + Terms<BITS>::MOST);
      Terms<BITS> terms[M][N];
      UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int n = 0; n < N; n++) terms[m][n].begin(sums[m][n]);
      gathered<M, N, J, STOP>(data, size, x, terms);
      UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int n = 0; n < N; n++) sums[m][n] = terms[m][n].total(sums[m][n]);
      quads<M, N, STOP, END>(data, size, x, sums);
    }
  }

  template <int M, int N, int J, int STOP>
  static void gathered(const uint8_t* data, int64_t size, const uint32_t* x, Terms<BITS> (&terms)[M][N]) {
    if constexpr (J < STOP) {
      Quads weight[N];
      UNROLLED for (int n = 0; n < N; n++) weight[n] = block_quad<BITS, J>(data + n * size);
      UNROLLED for (int m = 0; m < M; m++) {
        auto input = input_quad<M>(x + m, J);
        UNROLLED for (int n = 0; n < N; n++) terms[m][n].add(weight[n], input);
      }
      gathered<M, N, J + 1, STOP>(data, size, x, terms);
    }
  }
};

}  // namespace sametoken
