// Attention over cache pages where they lie: the committed prefix of a row, then each node's own path.
//
// Keys are visited in the order of their positions, in blocks of 16 aligned to position 0, a tree node's path as if it
// stood side by side. So a query's bits depend on its own keys alone: not on pages, tree shape, or other queries. Several
// queries and two blocks of keys are computed side by side, each sum in the order of its own numbers.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "pointwise.h"
#include "rows.h"
#include "spans.h"
#include "team.h"

namespace sametoken {

// Where sixteen stored vectors of a head lie, and what their codes are to be multiplied with.
struct Sixteen {
  const char* at[LANES];
  float scale[LANES];
};

class Attention {
 public:
  // q: [tokens][q_stride] rotated queries; out: [tokens][out_stride]; window: keys a query sees, 0 for all, or the
  // length of `chunks`, of which a query sees its own up to itself; sinks: a score of each query head that takes part in
  // its softmax without a key, or null.
  Attention(const Cache& cache, const Heads& heads, const Places& places, const bf16* q, int64_t q_stride, bf16* out,
            int64_t out_stride, int64_t window, bool chunks, const bf16* sinks)
      : cache_(cache), heads_(heads), places_(places), q_(q), q_stride_(q_stride), out_(out), out_stride_(out_stride),
        window_(window), chunks_(chunks), sinks_(sinks), words_(heads.size / 2), groups_(heads.groups()) {}

  void operator()(const Attending& task, Scratch& memory) const {
    const Block& block = task.block;
    int head = task.head, queries = block.nodes * groups_, size = heads_.size;
    int64_t first = INT64_MAX, last = 0;  // keys that any query of the block sees
    for (int n = 0; n < block.nodes; n++) {
      first = std::min(first, begin_of(block.token + n));
      last = std::max(last, end_of(block.token + n));
    }
    first = first / LANES * LANES;
    Room room(memory, queries, size, (last - first + LANES - 1) / LANES, cache_.form);
    for (int q = 0; q < queries; q++) {
      const bf16* from = q_ + (block.token + q / groups_) * q_stride_ + (head * groups_ + q % groups_) * size;
      char* to = room.asked + size_t(q) * Query::bytes(size);
      if (cache_.form == KV_BF16) std::memcpy(to, from, size_t(size) * 2);
      else room.split[q] = {cache_.form, from, size, to};
      store(room.most + q * LANES, spread(-INFINITY));
      store(room.total + q * LANES, zeros());
    }
    std::fill(room.sums, room.sums + int64_t(queries) * size, 0.0f);
    walk(block, head, cache_.keys, first, last, [&](int q, int end, int64_t key, const Sixteen* keys, int count) {
      score(block, room, {q, end}, key, room.scores + (key - first) * queries, keys, count);
    });
    for (int q = 0; q < queries; q++) {
      float sink = sinks_ == nullptr ? -INFINITY : to_float(sinks_[head * groups_ + q % groups_]);
      store(room.most + q * LANES, spread(std::max(lane_max(load(room.most + q * LANES)), sink)));
    }
    soften(block, room, first, last);
    for (int q = 0; q < queries; q++) {
      float rest = 0;
      if (sinks_ != nullptr) {
        float sink = to_float(sinks_[head * groups_ + q % groups_]);
        rest = lane_max(exponential(sub(spread(sink), load(room.most + q * LANES))));
      }
      store(room.total + q * LANES, spread(1.0f / (lane_sum(load(room.total + q * LANES)) + rest)));
    }
    walk(block, head, cache_.values, first, last, [&](int q, int end, int64_t key, const Sixteen* values, int count) {
      gather(room, {q, end}, room.scores + (key - first) * queries, values, count);
    });
    for (int q = 0; q < queries; q++) {
      bf16* to = out_ + (block.token + q / groups_) * out_stride_ + (head * groups_ + q % groups_) * size;
      for (int i = 0; i < size; i += LANES) store_bf16(to + i, load(room.sums + q * size + i));
    }
  }

 private:
  static constexpr int SIDE = REGISTERS == 32 ? 2 : 1;  // blocks of 16 keys side by side
  static constexpr int TALL = REGISTERS == 32 ? 4 : 2;  // queries, and with values blocks of 16 numbers, side by side

  // What a task keeps. Scores lie by block of 16 keys: [block][query][16], so that all of them are passed in order.
  struct Room {
    int queries;
    float *scores, *sums, *most, *total;  // sums: [query][size]; greatest score and sum of weights, by lane, of a query
    float* values;                        // [SIDE * 16][size], of the keys at hand
    uint32_t* turned;                     // [SIDE][words][16] the keys at hand, in the same place
    Query* split;                         // [query], of codes
    char* asked;                          // [query][Query::bytes] queries, bfloat16 numbers or codes

    Room(Scratch& memory, int queries, int size, int64_t blocks, int32_t form) : queries(queries) {
      int64_t hand = SIDE * LANES * std::max(size, size / 2 + LANES);
      int64_t floats = queries * (blocks * LANES + size + 2 * LANES) + hand;
      char* at = memory.reserve(size_t(floats) * 4 + size_t(queries) * (sizeof(Query) + Query::bytes(size)) + 8 * 64);
      take(at, scores, queries * blocks * LANES);
      take(at, sums, queries * size);
      take(at, most, queries * LANES);
      take(at, total, queries * LANES);
      take(at, values, hand);
      turned = reinterpret_cast<uint32_t*>(values);
      take(at, asked, queries * int64_t(Query::bytes(size)));
      take(at, split, form == KV_BF16 ? 0 : queries);
    }
  };
  struct Some { int first, end; };  // queries of a block

  int64_t end_of(int token) const { return places_.position[size_t(token)] + 1; }
  int64_t begin_of(int token) const {
    if (window_ == 0) return 0;
    int64_t position = places_.position[size_t(token)];
    return chunks_ ? position - position % window_ : std::max(int64_t(0), position + 1 - window_);
  }

  // Hands keys or values to visit(first query, end, position, Sixteen[count], count), in the order of their positions.
  // Up to the committed length all nodes of a block have the same keys; past it each tree node has its own.
  template <class Visit>
  void walk(const Block& block, int head, const Plane& plane, int64_t first, int64_t last, Visit visit) const {
    Sixteen rows[SIDE];
    auto pass = [&](int node, int nodes, int64_t from, int64_t to, int64_t end) {
      for (int64_t key = from; key < to; key += SIDE * LANES) {
        int count = 0;
        for (; count < SIDE && key + count * LANES < to; count++) {
          locate(block, node, key + count * LANES, end, head, plane, rows[count]);
          prefetch(block, key + (count + AHEAD) * LANES, end, head, plane);
        }
        visit(node * groups_, (node + nodes) * groups_, key, rows, count);
      }
    };
    if (block.chain) return pass(0, block.nodes, first, last, last);
    int64_t shared = std::max(first, block.span->starts[block.row] / LANES * LANES);
    pass(0, block.nodes, first, std::min(shared, last), shared);
    for (int n = 0; n < block.nodes; n++) pass(n, 1, shared, end_of(block.token + n), end_of(block.token + n));
  }
  static constexpr int AHEAD = 4;  // blocks of 16 keys

  // Whether 16 keys from `key` on lie side by side in a page, in the order of their positions.
  bool together(const Block& block, int64_t key, int64_t end) const {
    return cache_.page_size % LANES == 0 && key + LANES <= (block.chain ? end : std::min(end, block.span->starts[block.row]));
  }

  // Where 16 keys from position `key` on lie; positions from `end` on repeat a key that is there, nobody sees them.
  void locate(const Block& block, int node, int64_t key, int64_t end, int head, const Plane& plane, Sixteen& rows) const {
    const Span& span = *block.span;
    int64_t start = span.starts[block.row], bytes = heads_.size * kv_bytes(cache_.form), slot = 0;
    const std::vector<int32_t>& path = places_.path[size_t(block.token + node)];
    bool side = together(block, key, end);
    for (int i = 0; i < LANES; i++) {
      if (!side || i == 0) {
        int64_t position = std::min(key + i, end - 1);
        int64_t index = block.chain || position < start ? position : start + path[size_t(position - start)];
        slot = slot_of(cache_, span.rows[block.row], index);
      } else {
        slot++;
      }
      rows.at[i] = plane.vectors + (slot * heads_.key + head) * bytes;
      if (plane.scales != nullptr) rows.scale[i] = plane.scales[head * cache_.slots + slot];
    }
  }

  // Asks for 16 keys or values that will be read soon: those of one head lie too far apart for the processor to foresee.
  void prefetch(const Block& block, int64_t key, int64_t end, int head, const Plane& plane) const {
    if (!together(block, key, end)) return;
    int64_t bytes = heads_.size * kv_bytes(cache_.form), slot = slot_of(cache_, block.span->rows[block.row], key);
    const char* at = plane.vectors + (slot * heads_.key + head) * bytes;
    for (int i = 0; i < LANES; i++, at += heads_.key * bytes)
      for (int64_t byte = 0; byte < bytes; byte += 64) fetch(at + byte);
  }

  // Words of sixteen vectors of `words` words, turned: [word][vector].
  static void turn(const char* const* vectors, int words, uint32_t* turned) {
    for (int word = 0; word < words; word += LANES) {
      const uint32_t* at[LANES];
      uint32_t rest[LANES][LANES];
      for (int i = 0; i < LANES; i++) {
        at[i] = reinterpret_cast<const uint32_t*>(vectors[i]) + word;
        if (word + LANES <= words) continue;
        std::copy(at[i], at[i] + (words - word), rest[i]);  // what follows a head may not be ours to read
        at[i] = rest[i];
      }
      transpose16(at, turned + word * LANES);
    }
  }

  // The same as a product with queries reads them.
  void turn(const Sixteen& keys, uint32_t* turned) const {
    if (cache_.form == KV_BF16) return turn(keys.at, words_, turned);
    uint32_t* codes = turned + (cache_.form == KV_INT8 ? 0 : words_ / 2 * LANES);
    turn(keys.at, words_ / 2, codes);
    if (cache_.form == KV_INT8) {
      for (int i = 0; i < words_ / 2 * LANES; i++) turned[i] ^= 0x80808080;  // as load_int8 wants them
      return;
    }
    for (int word = 0; word < words_ / 2; word++) {  // a word's bytes 0 and 2, then 1 and 3, as the query has them
      Pairs bytes = load_pairs(codes + word * LANES);
      store_pairs(turned + 2 * word * LANES, any_fp8<0>(bytes));
      store_pairs(turned + (2 * word + 1) * LANES, any_fp8<1>(bytes));
    }
  }

  // Calls use(i, n) with steps of n <= MOST, a constant, from `first` to `end`.
  template <int MOST, class Use>
  static void in_steps(int first, int end, Use use) {
    for (; first + MOST <= end; first += MOST) use(first, std::integral_constant<int, MOST>());
    if constexpr (MOST > 1) in_steps<MOST - 1>(first, end, use);
  }

  // Scores of `count` blocks of keys from `key` on for some queries, stored at `scores`.
  void score(const Block& block, const Room& room, Some some, int64_t key, float* scores, const Sixteen* keys, int count) const {
    int stride = (words_ + LANES) * LANES;
    Floats scale[SIDE];
    for (int b = 0; b < count; b++) {
      turn(keys[b], room.turned + b * stride);
      scale[b] = spread(heads_.scale != 0 ? heads_.scale : 1.0f / std::sqrt(float(heads_.size)));
      if (cache_.form != KV_BF16) scale[b] = mul(scale[b], load(keys[b].scale));
    }
    auto keep = [&](int q, int b, Floats product) {
      Floats score = mul(product, scale[b]);
      if (heads_.cap != 0) score = capped(score, heads_.cap);
      store(scores + (b * room.queries + q) * LANES, score);
      float* most = room.most + q * LANES;
      store(most, greater(load(most), visible(block.token + q / groups_, key + b * LANES, score, -INFINITY)));
    };
    in_steps<TALL>(some.first, some.end, [&](int q, auto tall) {
      in_steps<SIDE>(0, count, [&](int b, auto side) {
        constexpr int Q = tall(), K = side();
        Floats out[Q][K];
        if (cache_.form == KV_INT8) {
          for (int i = 0; i < Q; i++)
            for (int j = 0; j < K; j++) out[i][j] = room.split[q + i].times(room.turned + (b + j) * stride, words_ / 2);
        } else {
          products(reinterpret_cast<const bf16*>(room.asked) + q * heads_.size, room.turned + b * stride, stride, out);
        }
        for (int i = 0; i < Q; i++)
          for (int j = 0; j < K; j++) keep(q + i, b + j, out[i][j]);
      });
    });
  }

  // Products of Q queries with K blocks of keys.
  template <int Q, int K>
  void products(const bf16* queries, const uint32_t* turned, int stride, Floats (&out)[Q][K]) const {
    Floats even[Q][K], odd[Q][K];
    for (int q = 0; q < Q; q++)
      for (int k = 0; k < K; k++) even[q][k] = odd[q][k] = zeros();
    for (int word = 0; word < words_; word += 2) {
      Pairs first[K], second[K];
      for (int k = 0; k < K; k++) {
        first[k] = load_pairs(turned + k * stride + word * LANES);
        second[k] = load_pairs(turned + k * stride + (word + 1) * LANES);
      }
      for (int q = 0; q < Q; q++) {
        const bf16* query = queries + q * heads_.size + 2 * word;
        Pairs left = spread_pair(dword(query)), right = spread_pair(dword(query + 2));
        for (int k = 0; k < K; k++) {
          even[q][k] = dot2(even[q][k], first[k], left);
          odd[q][k] = dot2(odd[q][k], second[k], right);
        }
      }
    }
    for (int q = 0; q < Q; q++)
      for (int k = 0; k < K; k++) out[q][k] = add(even[q][k], odd[q][k]);
  }

  // x of 16 keys from `key` on, and `hidden` in place of those that a token does not see.
  Floats visible(int token, int64_t key, Floats x, float hidden) const {
    int64_t begin = begin_of(token), end = end_of(token);
    if (begin <= key && key + LANES <= end) return x;
    float lanes[LANES];
    store(lanes, x);
    for (int i = 0; i < LANES; i++)
      if (key + i < begin || key + i >= end) lanes[i] = hidden;
    return load(lanes);
  }

  // Scores into weights, 0 for keys that a token does not see, and their sums.
  void soften(const Block& block, const Room& room, int64_t first, int64_t last) const {
    float* at = room.scores;
    for (int64_t key = first; key < last; key += LANES)
      for (int q = 0; q < room.queries; q++, at += LANES) {
        int token = block.token + q / groups_;
        if (key + LANES <= begin_of(token) || key >= end_of(token)) {
          store(at, zeros());
          continue;
        }
        Floats weight = visible(token, key, exponential(sub(load(at), load(room.most + q * LANES))), 0);
        store(at, weight);
        store(room.total + q * LANES, add(load(room.total + q * LANES), weight));
      }
  }

  // Adds weighted values to the sums of some queries, one key after the other. First divides each
  // weight by the sum of all, and multiplies it by the scale of a code.
  void gather(const Room& room, Some some, float* weights, const Sixteen* values, int count) const {
    int size = heads_.size;
    for (int b = 0; b < count; b++) {
      for (int k = 0; k < LANES; k++) {
        float* to = room.values + (b * LANES + k) * size;
        const char* at = values[b].at[k];
        for (int i = 0; i < size; i += LANES)
          store(to + i, cache_.form == KV_BF16 ? load_bf16(reinterpret_cast<const bf16*>(at) + i) : load_code(cache_.form, at + i));
      }
      for (int q = some.first; q < some.end; q++) {
        float* at = weights + (b * room.queries + q) * LANES;
        Floats share = mul(load(at), load(room.total + q * LANES));
        store(at, cache_.form == KV_BF16 ? share : mul(share, load(values[b].scale)));
      }
    }
    in_steps<TALL>(0, size / LANES, [&](int part, auto wide) {
      in_steps<TALL>(some.first, some.end, [&](int q, auto tall) {
        add_up<tall(), wide()>(weights + q * LANES, room.queries * LANES, room.values + part * LANES, count,
                               room.sums + q * size + part * LANES);
      });
    });
  }

  // Adds to D blocks of numbers of Q queries' sums.
  template <int Q, int D>
  void add_up(const float* weights, int stride, const float* values, int count, float* sums) const {
    Floats sum[Q][D];
    for (int q = 0; q < Q; q++)
      for (int d = 0; d < D; d++) sum[q][d] = load(sums + q * heads_.size + d * LANES);
    for (int b = 0; b < count; b++, weights += stride)
      for (int k = 0; k < LANES; k++, values += heads_.size) {
        Floats value[D];
        for (int d = 0; d < D; d++) value[d] = load(values + d * LANES);
        for (int q = 0; q < Q; q++) {
          Floats weight = spread(weights[q * LANES + k]);
          for (int d = 0; d < D; d++) sum[q][d] = fma(weight, value[d], sum[q][d]);
        }
      }
    for (int q = 0; q < Q; q++)
      for (int d = 0; d < D; d++) store(sums + q * heads_.size + d * LANES, sum[q][d]);
  }

  const Cache& cache_;
  const Heads& heads_;
  const Places& places_;
  const bf16* q_;
  int64_t q_stride_;
  bf16* out_;
  int64_t out_stride_, window_;
  bool chunks_;
  const bf16* sinks_;
  int words_, groups_;
};

}  // namespace sametoken
