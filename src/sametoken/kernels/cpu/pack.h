// Weights as files hold them, in the layouts that the kernels read: tiles of 16 outputs, within a tile step by step of the
// inputs; and AWQ's words as rows of codes.
#pragma once
#include <cstring>

#include "rows.h"
#include "team.h"

namespace sametoken {

// What becomes of the units of a row; FINITE ones are looked at too.
enum Turn : int32_t {
  AS_IS = 0,
  FINITE_BF16 = 1,  // pairs of bfloat16
  FLIPPED = 2,      // four signed bytes with 128 added
  FINITE_FP8 = 3,   // four float8_e4m3fn, the even ones first
  NIBBLES = 4,      // eight codes of four bits, the even ones first
  NIBBLE_QUADS = 5, // eight codes of four bits: code b in the low half of byte b, code 4 + b above it
};

template <Turn TURN>
inline uint32_t turned(uint32_t x) {
  auto evens = [](uint32_t y) {
    y &= 0x0f0f0f0f;
    y = (y | y >> 4) & 0x00ff00ff;
    return (y | y >> 8) & 0xffff;
  };
  if (TURN == FLIPPED) return x ^ 0x80808080;
  if (TURN == FINITE_FP8) return (x & 0xff0000ff) | (x >> 8 & 0xff00) | (x & 0xff00) << 8;
  if (TURN == NIBBLES) return evens(x) | evens(x >> 4) << 16;
  auto apart = [](uint32_t y) {
    y = (y | y << 8) & 0x00ff00ff;
    return (y | y << 4) & 0x0f0f0f0f;
  };
  if (TURN == NIBBLE_QUADS) return apart(x & 0xffff) | apart(x >> 16) << 4;
  return x;
}

// Not zero where four bytes of a row hold Inf or NaN (bfloat16) or NaN (FP8): then an exponent, or the lower seven bits of
// a byte, are all ones, and adding one to them carries into the sign's place.
template <Turn TURN>
inline uint32_t not_finite(uint32_t x) {
  if (TURN == FINITE_BF16) return ((x & 0x7f807f80) + 0x00800080) & 0x80008000;
  if (TURN == FINITE_FP8) return ((x & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  return 0;
}

// Rows of a weight, and where they go.
struct Packing {
  const char* source;       // [rows], `stride` bytes apart
  int64_t rows, row_bytes, stride;
  char* target;             // [tile][units][16] units of `unit` bytes
  int64_t first, outputs;   // the output that the first row is, and how many there are in all: more ones of a tile are zero
  int64_t units;            // of a row of the target; those past the source's are zero
};

// A tile's part of a packing; false where a number is not finite.
template <class Unit, Turn TURN>
bool pack_tile(const Packing& p, int64_t tile) {
  constexpr int BLOCK = 64;
  alignas(64) Unit block[LANES][BLOCK];
  int64_t begin = tile * LANES, low = std::max(p.first - begin, int64_t(0));
  int64_t end = p.first + p.rows, high = end == p.outputs ? LANES : std::min(end - begin, int64_t(LANES));
  uint32_t bad = 0;
  for (int64_t at = 0; at < p.units; at += BLOCK) {
    int64_t count = std::min<int64_t>(BLOCK, p.units - at);
    for (int64_t lane = low; lane < high; lane++) {
      int64_t row = begin + lane - p.first, from = at * int64_t(sizeof(Unit)), left = 0;
      if (row < p.rows) left = std::max(std::min(int64_t(sizeof(block[0])), p.row_bytes - from), int64_t(0));
      Unit* to = block[lane];
      if (left > 0) std::memcpy(to, p.source + row * p.stride + from, size_t(left));
      std::memset(reinterpret_cast<char*>(to) + left, 0, sizeof(block[0]) - size_t(left));
      if (TURN == AS_IS) continue;
      for (int i = 0; i < BLOCK; i++) {
        bad |= not_finite<TURN>(uint32_t(to[i]));
        to[i] = Unit(turned<TURN>(uint32_t(to[i])));
      }
    }
    Unit* out = reinterpret_cast<Unit*>(p.target) + (tile * p.units + at) * LANES;
    if (low == 0 && high == LANES && sizeof(Unit) == 4 && count % 16 == 0) {
      for (int64_t i = 0; i < count; i += 16)
        for (int lane = 0; lane < LANES; lane += 4)
          for (int part = 0; part < 16; part += 4) transpose4(&block[lane][i + part], BLOCK, out + (i + part) * LANES + lane, LANES);
    } else {
      for (int64_t i = 0; i < count; i++)
        for (int64_t lane = low; lane < high; lane++) out[i * LANES + lane] = block[lane][i];
    }
  }
  return bad == 0;
}

// Packs rows; false where a number is not finite.
inline bool pack(const Packing& p, int unit, Turn turn, int threads) {
  bool (*work)(const Packing&, int64_t) = nullptr;
  switch (turn) {
    case FINITE_BF16: work = pack_tile<uint32_t, FINITE_BF16>; break;
    case FLIPPED: work = pack_tile<uint32_t, FLIPPED>; break;
    case FINITE_FP8: work = pack_tile<uint32_t, FINITE_FP8>; break;
    case NIBBLES: work = pack_tile<uint32_t, NIBBLES>; break;
    case NIBBLE_QUADS: work = pack_tile<uint32_t, NIBBLE_QUADS>; break;
    default: work = unit == 1 ? pack_tile<uint8_t, AS_IS> : unit == 2 ? pack_tile<uint16_t, AS_IS> : pack_tile<uint32_t, AS_IS>;
  }
  if (p.rows == 0) return true;
  int64_t begin = p.first / LANES, end = (p.first + p.rows + LANES - 1) / LANES;
  std::atomic<bool> good{true};
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int(end - begin), [&](int tile) {
      if (!work(p, begin + tile)) good.store(false, std::memory_order_relaxed);
    });
  });
  return good.load();
}

// Codes [out][in / 2] of AWQ's words [in][out / 8]: an even input in the low four bits.
inline void awq_codes(const char* words, int64_t inputs, int64_t columns, uint8_t* codes, int threads) {
  constexpr int WORDS = 16, BLOCK = 64;            // words of a cache line, and codes that are written in one piece
  constexpr int EVENS[] = {0, 4, 1, 5}, ODDS[] = {2, 6, 3, 7};  // outputs at the even and odd places of a word
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int((columns + WORDS - 1) / WORDS), [&](int task) {
      uint8_t block[8 * WORDS][BLOCK];
      int64_t column = int64_t(task) * WORDS, wide = std::min<int64_t>(WORDS, columns - column), half = inputs / 2;
      for (int64_t at = 0; at < half; at += BLOCK) {
        int64_t count = std::min<int64_t>(BLOCK, half - at);
        for (int64_t i = 0; i < count; i++) {
          uint32_t rows[2][WORDS];
          for (int row = 0; row < 2; row++)
            std::memcpy(rows[row], words + ((2 * (at + i) + row) * columns + column) * 4, size_t(wide) * 4);
          for (int64_t w = 0; w < wide; w++) {
            uint32_t first = rows[0][w], second = rows[1][w];
            uint32_t even = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
            uint32_t odd = (first >> 4 & 0x0f0f0f0f) | (second & 0xf0f0f0f0);
            for (int b = 0; b < 4; b++) {
              block[8 * w + EVENS[b]][i] = uint8_t(even >> 8 * b);
              block[8 * w + ODDS[b]][i] = uint8_t(odd >> 8 * b);
            }
          }
        }
        for (int64_t row = 0; row < 8 * wide; row++)
          std::memcpy(codes + (8 * column + row) * half + at, block[row], size_t(count));
      }
    });
  });
}

// Whether float8_e4m3fn codes hold no NaN.
inline bool finite_fp8(const char* codes, int64_t size, int threads) {
  constexpr int64_t SHARE = 1 << 18;
  std::atomic<bool> good{true};
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int((size + SHARE - 1) / SHARE), [&](int task) {
      uint32_t bad = 0;
      int64_t at = task * SHARE, end = std::min(size, at + SHARE);
      for (; at + 4 <= end; at += 4) bad |= not_finite<FINITE_FP8>(dword(codes + at));
      for (; at < end; at++) bad |= not_finite<FINITE_FP8>(uint8_t(codes[at]));
      if (bad != 0) good.store(false, std::memory_order_relaxed);
    });
  });
  return good.load();
}

// Rows of codes in groups that share a scale and an offset, which is subtracted.
struct CodedRows {
  const uint8_t* codes;          // [rows], `row_bytes` bytes apart
  int64_t rows, row_bytes;
  int32_t format, inputs, group, zero;  // the code of four-bit integers that means zero
  const float *scale, *offset;   // [rows][groups]; offset may be null
  bf16* numbers;                 // [rows][inputs]
};

template <int BITS>
inline int code_at(const uint8_t* from, int i) {
  constexpr int FIELDS = BITS == 6 ? 4 : 8, SIZE = 8 / FIELDS;
  const uint8_t* block = from + i / 32 * 4 * BITS;
  int j = i % 32 / 4, b = i % 4, low = block[j / 2 * 4 + b] >> (j % 2 * 4) & 15;
  return low | (block[16 + j / FIELDS * 4 + b] >> (j % FIELDS * SIZE) & ((1 << SIZE) - 1)) << 4;
}

// What the codes mean, each number rounded once in float32 and then to bfloat16. Inputs and groups are even.
template <int FORMAT>
void read_numbers(const CodedRows& r, int64_t row) {
  int groups = (r.inputs + r.group - 1) / r.group;
  const uint8_t* codes = r.codes + row * r.row_bytes;
  auto value = [&](int i) {
    int four_bits = codes[i / 2] >> (i % 2 * 4) & 15;
    switch (FORMAT) {
      case GROUPED_INT8: return float(int8_t(codes[i]));
      case FP4: return to_float(FP4_VALUES[four_bits]);
      case BLOCK_INT5: return float(code_at<5>(codes, i) - r.zero);
      case BLOCK_INT6: return float(code_at<6>(codes, i) - 32);
      default: return float(four_bits - r.zero);
    }
  };
  for (int group = 0; group < groups; group++) {
    int begin = group * r.group, end = std::min(begin + r.group, r.inputs);
    float scale = r.scale[row * groups + group], offset = r.offset == nullptr ? 0 : r.offset[row * groups + group];
    for (int i = begin; i < end; i++) r.numbers[row * r.inputs + i] = to_bf16(value(i) * scale - offset);
  }
}

inline void read_numbers(const CodedRows& r, int threads) {
  void (*work)(const CodedRows&, int64_t) = read_numbers<GROUPED_INT4>;
  if (r.format == GROUPED_INT8) work = read_numbers<GROUPED_INT8>;
  if (r.format == FP4) work = read_numbers<FP4>;
  if (r.format == BLOCK_INT5) work = read_numbers<BLOCK_INT5>;
  if (r.format == BLOCK_INT6) work = read_numbers<BLOCK_INT6>;
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int(r.rows), [&](int row) { work(r, row); });
  });
}

}  // namespace sametoken
