// Products with codes of other tools: a step of codes becomes bfloat16, which holds each of them exactly, and serves all rows.
//
// Groups of inputs are summed one by one and added, each times its scale, in the order of the inputs. Scales, zeros and
// offsets lie by tile, so that they stream through a core beside the codes.
#pragma once
#include "rows.h"

namespace sametoken {

// Scales and offsets of some consecutive groups of a tile, in float32.
struct Groups {
  static constexpr int MOST = 16;
  alignas(64) float scale[MOST][LANES], offset[MOST][LANES];

  // Reads `count` groups of `tile` from `first` on; a tile has `all`.
  __attribute__((noinline)) void read(const Codes& codes, int64_t tile, int all, int first, int count) {
    int64_t begin = (tile * all + first) * LANES;
    // Stores what value(p) makes of 16 numbers at p for each group, and asks for those of the next groups.
    auto into = [&](auto& to, const auto* from, auto value) {
      for (int i = 0; i < count; i++) {
        fetch(from + begin + (i + MOST) * LANES);
        store(to[i], value(from + begin + i * LANES));
      }
    };
    auto stepped = [&](auto& to, const void* bytes, const uint16_t* steps) {
      int per = int(codes.groups), left = per - first % per;
      const uint16_t* at = steps + (tile * (all / per) + first / per) * LANES;
      const int8_t* from = static_cast<const int8_t*>(bytes) + begin;
      for (int i = 0; i < count; left = per, at += LANES) {
        Floats step = load_fp16(at);
        for (int end = std::min(count, i + left); i < end; i++) {
          if (i % 4 == 0) fetch(from + (i + MOST) * LANES);
          store(to[i], mul(load_signed(from + i * LANES), step));
        }
      }
    };
    auto power = [](const uint8_t* p) { return floats_of(left<23>(load_bytes(p))); };  // 2^(byte - 127)
    switch (codes.scales) {
      case FLOAT32: into(scale, static_cast<const float*>(codes.scale), load); break;
      case FLOAT16: into(scale, static_cast<const uint16_t*>(codes.scale), load_fp16); break;
      case BFLOAT16: into(scale, static_cast<const bf16*>(codes.scale), load_bf16); break;
      case FLOAT8: into(scale, static_cast<const uint8_t*>(codes.scale), load_fp8); break;
      case STEPPED8: stepped(scale, codes.scale, codes.step); break;
      default: into(scale, static_cast<const uint8_t*>(codes.scale), power);
    }
    if (codes.offset == nullptr) return;
    if (codes.offset_step != nullptr) stepped(offset, codes.offset, codes.offset_step);
    else into(offset, static_cast<const float*>(codes.offset), load);
  }
};

// Codes. A step of BYTES holds PAIRS pairs of inputs for each of 16 outputs. `load` gives a step less its zeros as far as
// that is the same for all pairs, and `pair` one pair in bfloat16. Where is_rare says so of a step, some of its codes are
// rare ones, which `pair` decodes more slowly. From 5 rows on at most TILES are multiplied together.

// [tile][in / 4][16] words of float8_e4m3fn: the even inputs in the low half, the odd ones in the high half.
struct Fp8Code {
  static constexpr int BYTES = 64, PAIRS = 2, TILES = 3;
  explicit Fp8Code(const Codes&) {}
  static Pairs zero(const int8_t*) { return spread_pair(0); }
  static Pairs load(const uint8_t* at, const Pairs&) { return load_pairs(at); }
  static bool is_rare(const Pairs& step) { return has_tiny_fp8(step); }
  template <int PAIR, bool RARE>
  static Pairs pair(const Pairs& step) { return RARE ? any_fp8<PAIR>(step) : normal_fp8<PAIR>(step); }
};

// [tile][in / 2][16][2] signed bytes.
template <bool SHIFTED>
struct Int8Code {
  static constexpr int BYTES = 32, PAIRS = 1, TILES = 3;
  explicit Int8Code(const Codes&) {}
  static Pairs zero(const int8_t* at) { return SHIFTED ? twice_int16(at) : spread_pair(0); }
  static Pairs load(const uint8_t* at, const Pairs& zero) {
    return SHIFTED ? pairs_of_int16(sub_int16(int16_of_bytes(at), zero)) : widen_bytes(at);
  }
  static bool is_rare(const Pairs&) { return false; }
  template <int, bool>
  static Pairs pair(const Pairs& step) { return step; }
};

// [tile][in / 8][16] words: four even inputs in the low half, the odd ones in the high half, four bits each.
struct NibbleCode {
  static constexpr int BYTES = 64, PAIRS = 4, TILES = 1;
  Table table;
  NibbleCode(const uint16_t (&values)[16]) : table(table_of(values)) {}
  static Pairs zero(const int8_t*) { return spread_pair(0); }
  static Pairs load(const uint8_t* at, const Pairs&) { return load_pairs(at); }
  static bool is_rare(const Pairs&) { return false; }
  template <int PAIR, bool>
  Pairs pair(const Pairs& step) const { return looked_up(table, right_int16<4 * PAIR>(step)); }
};
struct Fp4Code : NibbleCode {
  explicit Fp4Code(const Codes&) : NibbleCode(FP4_VALUES) {}
};
struct Int4Code : NibbleCode {
  explicit Int4Code(const Codes& codes) : NibbleCode(codes.offset == nullptr ? CENTRED_INTS : SMALL_INTS) {}
};

// The same with zeros of its own for each group.
struct ShiftedInt4Code {
  static constexpr int BYTES = 64, PAIRS = 4, TILES = 3;
  struct Step { Pairs even, odd; };  // pairs 0 and 2, and pairs 1 and 3, as signed bytes
  explicit ShiftedInt4Code(const Codes&) {}
  static Pairs zero(const int8_t* at) { return four_times(at); }
  static Step load(const uint8_t* at, const Pairs& zero) {
    Pairs codes = load_pairs(at);
    return {sub_bytes(low_nibble_bytes(codes), zero), sub_bytes(low_nibble_bytes(right_int16<4>(codes)), zero)};
  }
  static bool is_rare(const Step&) { return false; }
  template <int PAIR, bool>
  static Pairs pair(const Step& step) { return small_bytes<PAIR / 2>(PAIR % 2 == 0 ? step.even : step.odd); }
};

template <class Code>
struct CodeKernel {
  static constexpr int STEP = 2 * Code::PAIRS;  // inputs
  // Each tile is a stream of codes and one of scales: more of them at once cost more than the rows' loads that they save.
  static constexpr int together(int rows) {
    if (REGISTERS == 16) return tiles_together(rows, 2);
    return rows < 5 ? 2 : std::min(Code::TILES, 16 / rows);
  }

  template <int M, int N>
  static void tile(const Weight& w, const Rows& rows, int row, int tile, Floats (&out)[M][N]) {
    const Codes& codes = *codes_of(w);
    const Code code(codes);
    int64_t width = padded(w.in, 128), size = width / STEP * Code::BYTES, k = 0;
    int groups = (w.in + w.group - 1) / w.group;
    Lead lead(size, Code::BYTES, N);
    const uint8_t* data = w.data + tile * size;
    const uint32_t* x = rows.block(row, w);
    Groups read[N];
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) out[m][n] = zeros();
    for (int group = 0; group < groups; group++) {
      int part = group % Groups::MOST;
      for (int n = 0; n < N && part == 0; n++) read[n].read(codes, tile + n, groups, group, std::min(groups - group, Groups::MOST));
      Floats sums[M][N];
      Pairs zero[N];
      UNROLLED for (int n = 0; n < N; n++) {
        zero[n] = code.zero(codes.zero + (int64_t(tile + n) * groups + group) * LANES);
        UNROLLED for (int m = 0; m < M; m++) sums[m][n] = zeros();
      }
      int64_t end = std::min<int64_t>(k + w.group, width);
      for (; k < end; k += STEP, data += Code::BYTES, x += Code::PAIRS * M) {
        int64_t ahead = lead.at(k / STEP);
        UNROLLED for (int n = 0; n < N; n++) fetch(data + n * size + ahead);
        step<M, N>(code, data, size, x, zero, sums);
      }
      UNROLLED for (int n = 0; n < N; n++) {
        Floats scale = load(read[n].scale[part]);
        UNROLLED for (int m = 0; m < M; m++) out[m][n] = fma(sums[m][n], scale, out[m][n]);
      }
      if (codes.offset == nullptr) continue;
      UNROLLED for (int n = 0; n < N; n++) {
        Floats offset = load(read[n].offset[part]);
        UNROLLED for (int m = 0; m < M; m++) out[m][n] = fma(offset, spread(rows.minus[(row + m) * (rows.width / LANES) + group]), out[m][n]);
      }
    }
    UNROLLED for (int n = 0; n < N; n++) {
      Floats factor = codes.factor == nullptr ? spread(1.0f) : load(codes.factor + (tile + n) * LANES);
      UNROLLED for (int m = 0; m < M; m++) out[m][n] = mul(out[m][n], factor);
    }
  }

 private:
  // Adds a step's products of N tiles, `size` bytes apart, by M rows.
  template <int M, int N>
  static void step(const Code& code, const uint8_t* data, int64_t size, const uint32_t* x, const Pairs (&zero)[N], Floats (&sums)[M][N]) {
    decltype(code.load(data, zero[0])) loaded[N];
    bool rare = false;
    UNROLLED for (int n = 0; n < N; n++) {
      loaded[n] = code.load(data + n * size, zero[n]);
      rare |= code.is_rare(loaded[n]);
    }
    if (__builtin_expect(rare, 0)) pairs<M, N, true, 0>(code, loaded, x, sums);
    else pairs<M, N, false, 0>(code, loaded, x, sums);
  }

  template <int M, int N, bool RARE, int PAIR, class Step>
  static void pairs(const Code& code, const Step (&loaded)[N], const uint32_t* x, Floats (&sums)[M][N]) {
    if constexpr (PAIR < Code::PAIRS) {
      Pairs weight[N];
      UNROLLED for (int n = 0; n < N; n++) weight[n] = code.template pair<PAIR, RARE>(loaded[n]);
      UNROLLED for (int m = 0; m < M; m++) {
        Pairs input = spread_pair(x[PAIR * M + m]);
        UNROLLED for (int n = 0; n < N; n++) sums[m][n] = dot2(sums[m][n], weight[n], input);
      }
      pairs<M, N, RARE, PAIR + 1>(code, loaded, x, sums);
    }
  }
};

}  // namespace sametoken
