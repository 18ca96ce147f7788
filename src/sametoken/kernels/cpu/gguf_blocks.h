// Blocks of llama.cpp as rows of codes, scales and offsets.
#pragma once
#include <cstring>

#include "team.h"

namespace sametoken {

// 32 codes of 5 or 6 bits as blocks.h has them, in 4 * BITS bytes; four codes at a time.
template <int BITS>
inline void join_bits(const uint8_t* codes, uint8_t* to) {
  constexpr int FIELDS = BITS == 6 ? 4 : 8, SIZE = 8 / FIELDS;
  constexpr uint32_t LOW = 0x0f0f0f0f, HIGH = 0x01010101 * ((1 << SIZE) - 1);
  uint32_t in[8], out[BITS] = {};
  std::memcpy(in, codes, sizeof(in));
  for (int j = 0; j < 8; j++) {
    out[j / 2] |= (in[j] & LOW) << (j % 2 * 4);
    out[4 + j / FIELDS] |= (in[j] >> 4 & HIGH) << (j % FIELDS * SIZE);
  }
  std::memcpy(to, out, sizeof(out));
}

// Codes of 5 or 6 bits, a byte each, in groups of 32.
inline void join_bits(const uint8_t* codes, int64_t groups, int bits, uint8_t* to, int threads) {
  constexpr int64_t SHARE = 1024;
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int((groups + SHARE - 1) / SHARE), [&](int task) {
      for (int64_t i = task * SHARE; i < std::min(groups, (task + 1) * SHARE); i++) {
        if (bits == 6)
          join_bits<6>(codes + 32 * i, to + 24 * i);
        else
          join_bits<5>(codes + 32 * i, to + 20 * i);
      }
    });
  });
}

// Blocks of llama.cpp as Coded has them: codes, four-bit ones with an even input in the low half of a byte, those of 5 and
// 6 bits as join_bits makes them, and scales, offsets, steps and offset steps as they are where a kind has them. SIZES
// says how many bytes of each a block has.
enum BlockKind : int32_t { Q8_0, Q4_0, MXFP4, Q4_K, Q5_K, Q6_K, Q5_0, Q4_1, Q5_1, IQ4_NL, IQ4_XS, Q3_K, Q2_K, NVFP4, TQ1_0, TQ2_0 };
enum BlockPart : int { CODES, SCALE, OFFSET, STEP, OFFSET_STEP, PARTS };

// 2 * N four-bit codes, the low halves of N bytes and then the high ones, as N bytes of pairs.
template <int N>
inline void pair_halves(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < N / 2; i++) {
    to[i] = uint8_t((from[2 * i] & 15) | from[2 * i + 1] << 4);
    to[N / 2 + i] = uint8_t(from[2 * i] >> 4 | (from[2 * i + 1] & 240));
  }
}

// Steps of scales and offsets, and eight six-bit numbers of each.
inline void read_k_scales(const uint8_t* from, uint8_t* const* to) {
  std::memcpy(to[STEP], from, 2);
  std::memcpy(to[OFFSET_STEP], from + 2, 2);
  const uint8_t *first = from + 4, *second = from + 8, *both = from + 12;
  for (int i = 0; i < 4; i++) {
    to[SCALE][i] = first[i] & 63;
    to[SCALE][4 + i] = uint8_t((both[i] & 15) | (first[i] >> 2 & 48));
    to[OFFSET][i] = second[i] & 63;
    to[OFFSET][4 + i] = uint8_t(both[i] >> 4 | (second[i] >> 2 & 48));
  }
}

template <int KIND>
struct BlockOf;
template <>
struct BlockOf<Q8_0> {
  static constexpr int BYTES = 34, SIZES[PARTS] = {32, 2, 0, 0, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[SCALE], from, 2);
    std::memcpy(to[CODES], from + 2, 32);
  }
};
template <>
struct BlockOf<Q4_0> {
  static constexpr int BYTES = 18, SIZES[PARTS] = {16, 2, 0, 0, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[SCALE], from, 2);
    pair_halves<16>(from + 2, to[CODES]);
  }
};
template <>
struct BlockOf<MXFP4> {
  static constexpr int BYTES = 17, SIZES[PARTS] = {16, 1, 0, 0, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    uint8_t* codes = to[CODES];
    to[SCALE][0] = from[0];
    pair_halves<16>(from + 1, codes);
    for (int i = 0; i < 16; i++) {  // ggml has no negative zero
      uint8_t even = codes[i] & 15, odd = codes[i] >> 4;
      codes[i] = uint8_t((even == 8 ? 0 : even) | (odd == 8 ? 0 : odd) << 4);
    }
  }
};
template <>
struct BlockOf<Q4_K> {
  static constexpr int BYTES = 144, SIZES[PARTS] = {128, 8, 8, 2, 2};
  static void read(const uint8_t* from, uint8_t* const* to) {
    read_k_scales(from, to);
    for (int part = 0; part < 4; part++) pair_halves<32>(from + 16 + 32 * part, to[CODES] + 32 * part);
  }
};
template <>
struct BlockOf<Q5_K> {
  static constexpr int BYTES = 176, SIZES[PARTS] = {160, 8, 8, 2, 2};
  static void read(const uint8_t* from, uint8_t* const* to) {
    read_k_scales(from, to);
    const uint8_t *high = from + 16, *low = from + 48;
    for (int part = 0; part < 8; part++) {
      uint8_t codes[32];
      for (int i = 0; i < 32; i++)
        codes[i] = uint8_t((low[part / 2 * 32 + i] >> (part % 2 * 4) & 15) | (high[i] >> part & 1) << 4);
      join_bits<5>(codes, to[CODES] + 20 * part);
    }
  }
};
template <>
struct BlockOf<Q6_K> {
  static constexpr int BYTES = 210, SIZES[PARTS] = {192, 16, 0, 2, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[SCALE], from + 192, 16);
    std::memcpy(to[STEP], from + 208, 2);
    for (int part = 0; part < 8; part++) {
      const uint8_t *low = from + part / 4 * 64 + part % 2 * 32, *high = from + 128 + part / 4 * 32;
      int low_half = part % 4 / 2 * 4, bits = part % 4 * 2;
      uint8_t codes[32];
      for (int i = 0; i < 32; i++) codes[i] = uint8_t((low[i] >> low_half & 15) | (high[i] >> bits & 3) << 4);
      join_bits<6>(codes, to[CODES] + 24 * part);
    }
  }
};

// 32 codes of four bits: the low halves of 16 bytes, then the high ones.
inline void halves_of_16(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[16 + i] = from[i] >> 4;
}

// 32 codes of five bits, the fifth ones in four bytes of their own.
inline void read_five_bits(const uint8_t* high, const uint8_t* low, uint8_t* to) {
  uint8_t codes[32];
  uint32_t upper;
  std::memcpy(&upper, high, 4);
  halves_of_16(low, codes);
  for (int i = 0; i < 32; i++) codes[i] |= uint8_t((upper >> i & 1) << 4);
  join_bits<5>(codes, to);
}

// Signed values of 32 codes of four bits.
inline void read_iq4(const uint8_t* from, uint8_t* to) {
  static constexpr int8_t VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  halves_of_16(from, to);
  for (int i = 0; i < 32; i++) to[i] = uint8_t(VALUES[to[i]]);
}

// The minimum that is added to a group, as a step of the offset -1, which is subtracted.
inline void read_minimum(const uint8_t* from, uint8_t* const* to) {
  to[OFFSET][0] = 255;
  std::memcpy(to[OFFSET_STEP], from, 2);
}

template <>
struct BlockOf<Q5_0> {
  static constexpr int BYTES = 22, SIZES[PARTS] = {20, 2, 0, 0, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[SCALE], from, 2);
    read_five_bits(from + 2, from + 6, to[CODES]);
  }
};
template <>
struct BlockOf<Q4_1> {
  static constexpr int BYTES = 20, SIZES[PARTS] = {16, 2, 1, 0, 2};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[SCALE], from, 2);
    read_minimum(from + 2, to);
    pair_halves<16>(from + 4, to[CODES]);
  }
};
template <>
struct BlockOf<Q5_1> {
  static constexpr int BYTES = 24, SIZES[PARTS] = {20, 2, 1, 0, 2};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[SCALE], from, 2);
    read_minimum(from + 2, to);
    read_five_bits(from + 4, from + 8, to[CODES]);
  }
};
template <>
struct BlockOf<IQ4_NL> {
  static constexpr int BYTES = 18, SIZES[PARTS] = {32, 2, 0, 0, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[SCALE], from, 2);
    read_iq4(from + 2, to[CODES]);
  }
};
template <>
struct BlockOf<IQ4_XS> {
  static constexpr int BYTES = 136, SIZES[PARTS] = {256, 8, 0, 2, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[STEP], from, 2);
    const uint8_t *high = from + 2, *low = from + 4;
    for (int part = 0; part < 8; part++) {
      int scale = (low[part / 2] >> (part % 2 * 4) & 15) | (high[part / 4] >> (part % 4 * 2) & 3) << 4;
      to[SCALE][part] = uint8_t(scale - 32);
      read_iq4(from + 8 + 16 * part, to[CODES] + 32 * part);
    }
  }
};
template <>
struct BlockOf<Q3_K> {
  static constexpr int BYTES = 110, SIZES[PARTS] = {192, 16, 0, 2, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    const uint8_t *upper = from, *numbers = from + 32, *scales = from + 96;
    std::memcpy(to[STEP], from + 108, 2);
    for (int i = 0; i < 16; i++) {
      int scale = (scales[i % 8] >> (i / 8 * 4) & 15) | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4;
      to[SCALE][i] = uint8_t(scale - 32);
    }
    for (int part = 0; part < 8; part++) {
      const uint8_t* low = numbers + part / 4 * 32;
      uint8_t codes[32];
      for (int i = 0; i < 32; i++)  // 0 .. 7 for -4 .. 3; zero is the code 32
        codes[i] = uint8_t(((low[i] >> (part % 4 * 2) & 3) | (upper[i] >> part & 1) << 2) + 28);
      join_bits<6>(codes, to[CODES] + 24 * part);
    }
  }
};
template <>
struct BlockOf<Q2_K> {
  static constexpr int BYTES = 84, SIZES[PARTS] = {192, 16, 16, 2, 2};
  static void read(const uint8_t* from, uint8_t* const* to) {
    std::memcpy(to[STEP], from + 80, 2);
    std::memcpy(to[OFFSET_STEP], from + 82, 2);
    for (int i = 0; i < 16; i++) to[SCALE][i] = from[i] & 15, to[OFFSET][i] = from[i] >> 4;
    for (int part = 0; part < 8; part++) {
      const uint8_t* low = from + 16 + part / 4 * 32;
      uint8_t codes[32];
      for (int i = 0; i < 32; i++) codes[i] = uint8_t((low[i] >> (part % 4 * 2) & 3) + 32);
      join_bits<6>(codes, to[CODES] + 24 * part);
    }
  }
};

template <>
struct BlockOf<NVFP4> {
  static constexpr int BYTES = 36, SIZES[PARTS] = {32, 4, 0, 0, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    uint8_t* codes = to[CODES];
    for (int part = 0; part < 4; part++) {
      to[SCALE][part] = from[part] == 127 ? 0 : from[part] & 127;
      pair_halves<8>(from + 4 + 8 * part, codes + 8 * part);
    }
    for (int i = 0; i < 32; i++) {  // as for MXFP4
      uint8_t even = codes[i] & 15, odd = codes[i] >> 4;
      codes[i] = uint8_t((even == 8 ? 0 : even) | (odd == 8 ? 0 : odd) << 4);
    }
  }
};

// 256 numbers 0, 1, 2 (or 3) for -1, 0, 1 (or 2) as codes of four bits whose zero is 8, scales of one, and the step.
inline void write_ternary(const uint8_t* numbers, const uint8_t* step, uint8_t* const* to) {
  std::memcpy(to[STEP], step, 2);
  std::memset(to[SCALE], 1, 8);
  for (int i = 0; i < 128; i++) to[CODES][i] = uint8_t((numbers[2 * i] + 7) | (numbers[2 * i + 1] + 7) << 4);
}

template <>
struct BlockOf<TQ1_0> {
  static constexpr int BYTES = 54, SIZES[PARTS] = {128, 8, 0, 2, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    static constexpr uint8_t POWERS[] = {1, 3, 9, 27, 81};
    uint8_t numbers[256], *at = numbers;
    auto digits = [&](const uint8_t* bytes, int size, int count) {
      for (int power = 0; power < count; power++)
        for (int i = 0; i < size; i++) *at++ = uint8_t(uint8_t(bytes[i] * POWERS[power]) * 3 >> 8);
    };
    digits(from, 32, 5);
    digits(from + 32, 16, 5);
    digits(from + 48, 4, 4);
    write_ternary(numbers, from + 52, to);
  }
};
template <>
struct BlockOf<TQ2_0> {
  static constexpr int BYTES = 66, SIZES[PARTS] = {128, 8, 0, 2, 0};
  static void read(const uint8_t* from, uint8_t* const* to) {
    uint8_t numbers[256];
    for (int part = 0; part < 8; part++)
      for (int i = 0; i < 32; i++) numbers[32 * part + i] = from[part / 4 * 32 + i] >> (part % 4 * 2) & 3;
    write_ternary(numbers, from + 64, to);
  }
};

// `count` times eight numbers of a codebook [entries][WIDTH], 8 / WIDTH entries for eight, times the signs of a row of
// `signs` [rows][8]; without signs where there are none.
template <int WIDTH>
void read_entries(const int8_t* book, const int32_t* entries, const int8_t* signs, const int32_t* rows, int64_t count,
                  int8_t* to, int threads) {
  constexpr int64_t SHARE = 4096;
  constexpr int EACH = 8 / WIDTH;
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int((count + SHARE - 1) / SHARE), [&](int task) {
      for (int64_t i = task * SHARE; i < std::min(count, (task + 1) * SHARE); i++) {
        int8_t numbers[8];
        for (int j = 0; j < EACH; j++) std::memcpy(numbers + j * WIDTH, book + entries[i * EACH + j] * WIDTH, WIDTH);
        if (signs != nullptr)
          for (int j = 0; j < 8; j++) numbers[j] = int8_t(numbers[j] * signs[rows[i] * 8 + j]);
        std::memcpy(to + i * 8, numbers, 8);
      }
    });
  });
}

template <int KIND>
void read_blocks(const uint8_t* blocks, int64_t count, uint8_t* const* parts, int threads) {
  using Block = BlockOf<KIND>;
  constexpr int64_t SHARE = 256;
  Pool::instance().run(threads, 1, [&](Worker& worker) {
    worker.each(int((count + SHARE - 1) / SHARE), [&](int task) {
      for (int64_t i = task * SHARE; i < std::min(count, (task + 1) * SHARE); i++) {
        uint8_t* to[PARTS];
        for (int part = 0; part < PARTS; part++) to[part] = parts[part] + i * Block::SIZES[part];
        Block::read(blocks + i * Block::BYTES, to);
      }
    });
  });
}

// The parts of `count` blocks, each kind of part one after the other.
inline void read_blocks(int kind, const uint8_t* blocks, int64_t count, uint8_t* const* parts, int threads) {
  switch (kind) {
    case Q8_0: return read_blocks<Q8_0>(blocks, count, parts, threads);
    case Q4_0: return read_blocks<Q4_0>(blocks, count, parts, threads);
    case MXFP4: return read_blocks<MXFP4>(blocks, count, parts, threads);
    case Q4_K: return read_blocks<Q4_K>(blocks, count, parts, threads);
    case Q5_K: return read_blocks<Q5_K>(blocks, count, parts, threads);
    case Q6_K: return read_blocks<Q6_K>(blocks, count, parts, threads);
    case Q5_0: return read_blocks<Q5_0>(blocks, count, parts, threads);
    case Q4_1: return read_blocks<Q4_1>(blocks, count, parts, threads);
    case Q5_1: return read_blocks<Q5_1>(blocks, count, parts, threads);
    case IQ4_NL: return read_blocks<IQ4_NL>(blocks, count, parts, threads);
    case IQ4_XS: return read_blocks<IQ4_XS>(blocks, count, parts, threads);
    case Q3_K: return read_blocks<Q3_K>(blocks, count, parts, threads);
    case NVFP4: return read_blocks<NVFP4>(blocks, count, parts, threads);
    case TQ1_0: return read_blocks<TQ1_0>(blocks, count, parts, threads);
    case TQ2_0: return read_blocks<TQ2_0>(blocks, count, parts, threads);
    default: return read_blocks<Q2_K>(blocks, count, parts, threads);
  }
}

}  // namespace sametoken
