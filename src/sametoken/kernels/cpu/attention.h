// Attention over cache pages where they lie: the committed prefix of a row, then each node's own path.
//
// Keys are visited in the order of their positions, in blocks of 16 and in chunks of 1024 aligned to position 0. A softmax
// is over a chunk; results of chunks are joined in their order. So a query's bits depend on its own keys alone: not on
// pages, tree shape, other queries, or who computes which chunk. Several queries and two blocks of keys are computed side
// by side, each sum in the order of its own numbers.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_matrix.h"
#include "attention_room.h"
#include "pointwise.h"
#include "rows.h"
#include "sixteen.h"
#include "team.h"

namespace sametoken {

class Attention {
 public:
  // q: [tokens][q_stride] rotated queries; out: [tokens][out_stride]; window: keys a query sees, 0 for all, or the
  // length of `chunks`, of which a query sees its own up to itself; sinks: a score of each query head that takes part in
  // its softmax without a key, or null; parts: [parts][part_floats] memory for results of chunks; matrix: whether there is
  // a matrix unit to be used, which multiplies bfloat16 heads of whole lines.
  Attention(const Cache& cache, const Heads& heads, const Places& places, const bf16* q, int64_t q_stride, bf16* out,
            int64_t out_stride, int64_t window, bool chunks, const bf16* sinks, float* parts, bool matrix)
      : cache_(cache), heads_(heads), places_(places), reader_(cache, heads, places), q_(q), q_stride_(q_stride), out_(out),
        out_stride_(out_stride), window_(window), chunks_(chunks), sinks_(sinks), parts_(parts), words_(heads.size / 2),
        groups_(heads.groups()), width_(part_floats(heads.size)),
        matrix_(matrix && cache.form == KV_BF16 && heads.size % (2 * LANES) == 0) {}

  // Numbers of a part: the mean of values, then the greatest score and the sum of weights.
  static int64_t part_floats(int size) { return size + LANES; }

  void operator()(const Attending& task, Scratch& memory) const {
    const Block& block = task.block;
    int64_t first = INT64_MAX, last = 0;  // keys that any query of the task sees
    Room room;
    TileShape tiles;
    room.tiles = &tiles;
    for (int n = 0; n < block.nodes; n++) {
      first = std::min(first, begin_of(block.token + n)), room.begin = std::max(room.begin, begin_of(block.token + n));
      last = std::max(last, end_of(block.token + n)), room.end = std::min(room.end, end_of(block.token + n));
    }
    if (task.chunk >= 0) first = std::max(first, task.chunk * CHUNK), last = std::min(last, (task.chunk + 1) * CHUNK);
    if (first >= last) return;
    room.take_from(memory, task.heads * block.nodes * groups_, heads_.size, width_, cache_.form);
    ask(task, room);
    for (int64_t at = first, end; at < last; at = end) {
      end = std::min(last, (at / CHUNK + 1) * CHUNK);
      attend(task, room, at / LANES * LANES, end);
      for (int q = 0; q < room.queries; q++) keep(task, room, q, at / CHUNK);
    }
    for (int q = 0; q < room.queries && task.chunk < 0; q++)
      write_result(token_of(task, q), head_of(task, q), room.joined + q * width_);
  }

  // Joins the parts of a token and key head in the order of their chunks.
  void operator()(const Joining& task) const {
    int64_t first = begin_of(task.token) / CHUNK, last = (end_of(task.token) - 1) / CHUNK;
    for (int g = 0; g < groups_; g++) {
      float* parts = parts_ + (task.part + g * task.chunks) * width_;
      for (int64_t chunk = first + 1; chunk <= last; chunk++) join(parts + first * width_, parts + chunk * width_);
      write_result(task.token, task.head * groups_ + g, parts + first * width_);
    }
  }

 private:
  static constexpr int SIDE = Reader::SIDE;
  static constexpr int TALL = REGISTERS == 32 ? 4 : 2;  // queries, and with values blocks of 16 numbers, side by side

  struct Some { int first, end; };  // queries of a task, of one key head

  int64_t end_of(int token) const { return places_.position[size_t(token)] + 1; }
  int64_t begin_of(int token) const {
    if (window_ == 0) return 0;
    int64_t position = places_.position[size_t(token)];
    return chunks_ ? position - position % window_ : std::max(int64_t(0), position + 1 - window_);
  }
  int token_of(const Attending& task, int q) const { return task.block.token + q / groups_ % task.block.nodes; }
  int head_of(const Attending& task, int q) const {  // query head
    return (task.head + q / groups_ / task.block.nodes) * groups_ + q % groups_;
  }

  void ask(const Attending& task, Room& room) const {
    for (int q = 0; q < room.queries; q++) {
      const bf16* from = q_ + token_of(task, q) * q_stride_ + head_of(task, q) * heads_.size;
      char* to = room.asked + size_t(q) * Query::bytes(cache_.form, heads_.size);
      if (cache_.form == KV_BF16) std::memcpy(to, from, size_t(heads_.size) * 2);
      else room.split[q] = {cache_.form, from, heads_.size, to};
    }
  }

  // Attends to the keys first .. last of one chunk; `first` is a multiple of 16.
  void attend(const Attending& task, const Room& room, int64_t first, int64_t last) const {
    auto some = [&](int head, int node, int nodes) {
      int q = (head * task.block.nodes + node) * groups_;
      return Some{q, q + nodes * groups_};
    };
    for (int q = 0; q < room.queries; q++) {
      store(room.most + q * LANES, spread(-INFINITY));
      store(room.total + q * LANES, zeros());
    }
    std::fill(room.parts, room.parts + room.queries * width_, 0.0f);
    auto scores = [&](int64_t key) { return room.scores + (key - first) * room.queries; };
    Stretch keys{cache_.keys, first, last, cache_.values, first};
    reader_.walk(task, keys, [&](int head, int node, int nodes, int64_t key, const Sixteen* rows, int count) {
      score(task, room, some(head, node, nodes), key, scores(key), rows, count);
    });
    for (int q = 0; q < room.queries; q++) {
      float* most = room.most + q * LANES;
      store(most, spread(std::max(lane_max(load(most)), sink_of(task, q, first))));
    }
    soften(task, room, first, last);
    for (int q = 0; q < room.queries; q++) {
      float *most = room.most + q * LANES, *state = room.parts + q * width_ + heads_.size;
      float sink = sink_of(task, q, first), rest = 0;
      if (sink > -INFINITY) rest = lane_max(exponential(sub(spread(sink), load(most))));
      state[0] = most[0], state[1] = lane_sum(load(room.total + q * LANES)) + rest;
      store(room.total + q * LANES, spread(1.0f / state[1]));
    }
    Stretch values{cache_.values, first, last, cache_.keys, (first / CHUNK + 1) * CHUNK};
    reader_.walk(task, values, [&](int head, int node, int nodes, int64_t key, const Sixteen* rows, int count) {
      gather(room, some(head, node, nodes), scores(key), rows, count);
    });
  }

  // The score of a query's sink, which belongs to the first chunk that the query sees; `key` is a key of a chunk.
  float sink_of(const Attending& task, int q, int64_t key) const {
    bool its = sinks_ != nullptr && begin_of(token_of(task, q)) / CHUNK == key / CHUNK;
    return its ? to_float(sinks_[head_of(task, q)]) : -INFINITY;
  }

  // Keeps a query's part of a chunk: on its own, or joined with those of the chunks before.
  void keep(const Attending& task, const Room& room, int q, int64_t chunk) const {
    int token = token_of(task, q);
    int64_t first = begin_of(token) / CHUNK, last = (end_of(token) - 1) / CHUNK;
    if (chunk < first || chunk > last) return;
    const float* part = room.parts + q * width_;
    float* joined = room.joined + q * width_;
    if (task.chunk >= 0) {
      int64_t own = ((token - task.block.token) * heads_.query + head_of(task, q)) * task.chunks + chunk;
      std::copy(part, part + width_, parts_ + (task.part + own) * width_);
    } else if (chunk == first) {
      std::copy(part, part + width_, joined);
    } else {
      join(joined, part);
    }
  }

  void join(float* mean, const float* other) const {
    float *state = mean + heads_.size, most = std::max(state[0], other[heads_.size]);
    Floats before = mul(exponential(spread(state[0] - most)), spread(state[1]));
    Floats after = mul(exponential(spread(other[heads_.size] - most)), spread(other[heads_.size + 1]));
    Floats total = add(before, after), stays = divide(before, total), comes = divide(after, total);
    state[0] = most, state[1] = lane_max(total);
    for (int i = 0; i < heads_.size; i += LANES) store(mean + i, fma(load(other + i), comes, mul(load(mean + i), stays)));
  }

  void write_result(int token, int head, const float* mean) const {
    bf16* to = out_ + token * out_stride_ + head * heads_.size;
    for (int i = 0; i < heads_.size; i += LANES) store_bf16(to + i, load(mean + i));
  }
  // Calls use(i, n) with steps of n <= MOST, a constant, from `first` to `end`.
  template <int MOST, class Use>
  static void in_steps(int first, int end, Use use) {
    for (; first + MOST <= end; first += MOST) use(first, std::integral_constant<int, MOST>());
    if constexpr (MOST > 1) in_steps<MOST - 1>(first, end, use);
  }

  // Scores of `count` blocks of keys from `key` on for some queries, stored at `scores`.
  void score(const Attending& task, const Room& room, Some some, int64_t key, float* scores, const Sixteen* keys,
             int count) const {
    int stride = (words_ + LANES) * LANES;
    Floats scale[SIDE];
    for (int b = 0; b < count; b++) {
      reader_.turn(keys[b], room.turned + b * stride);
      scale[b] = spread(heads_.scale != 0 ? heads_.scale : 1.0f / std::sqrt(float(heads_.size)));
      if (cache_.form != KV_BF16) scale[b] = mul(scale[b], load(keys[b].scale));
    }
    auto keep = [&](int q, int b, Floats product) {
      Floats score = mul(product, scale[b]);
      if (heads_.cap != 0) score = capped(score, heads_.cap);
      store(scores + (b * room.queries + q) * LANES, score);
      float* most = room.most + q * LANES;
      if (!room.all_see(key + b * LANES)) score = visible(token_of(task, q), key + b * LANES, score, -INFINITY);
      store(most, greater(load(most), score));
    };
#ifdef SAMETOKEN_MATRIX_UNIT
    if (matrix_) {
      int64_t bytes = heads_.size * 2, apart = room.queries * LANES;
      TileRows queries{room.asked + some.first * bytes, bytes, some.end - some.first};
      float* to = scores + some.first * LANES;
      if (count == 2) tile_scores<2>(*room.tiles, queries, room.turned, stride, words_ / LANES, to, apart);
      else tile_scores<1>(*room.tiles, queries, room.turned, stride, words_ / LANES, to, apart);
      for (int b = 0; b < count; b++)
        for (int q = some.first; q < some.end; q++) keep(q, b, load(scores + b * apart + q * LANES));
      return;
    }
#endif
    in_steps<TALL>(some.first, some.end, [&](int q, auto tall) {
      in_steps<SIDE>(0, count, [&](int b, auto side) {
        constexpr int Q = tall(), K = side();
        Floats out[Q][K];
        if (cache_.form == KV_INT8) {
          Query::times(room.split + q, room.turned + b * stride, stride, words_ / 2, out);
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
  void soften(const Attending& task, const Room& room, int64_t first, int64_t last) const {
    float* at = room.scores;
    for (int64_t key = first; key < last; key += LANES) {
      bool whole = room.all_see(key);
      for (int q = 0; q < room.queries; q++, at += LANES) {
        int token = whole ? 0 : token_of(task, q);
        if (!whole && (key + LANES <= begin_of(token) || key >= end_of(token))) {
          store(at, zeros());
          continue;
        }
        Floats weight = exponential(sub(load(at), load(room.most + q * LANES)));
        if (!whole) weight = visible(token, key, weight, 0);
        store(at, weight);
        store(room.total + q * LANES, add(load(room.total + q * LANES), weight));
      }
    }
  }

  // Adds weighted values to the sums of some queries, one key after the other. First divides each
  // weight by the sum of all, and multiplies it by the scale of a code.
  void gather(const Room& room, Some some, float* weights, const Sixteen* values, int count) const {
    for (int b = 0; b < count; b++)
      for (int q = some.first; q < some.end; q++) {
        float* at = weights + (b * room.queries + q) * LANES;
        Floats share = mul(load(at), load(room.total + q * LANES));
        if (matrix_) store_bf16(room.shares + (b * room.queries + q) * LANES, share);
        else store(at, cache_.form == KV_BF16 ? share : mul(share, load(values[b].scale)));
      }
#ifdef SAMETOKEN_MATRIX_UNIT
    if (matrix_) {
      bf16* pairs = reinterpret_cast<bf16*>(room.values);
      for (int b = 0; b < count; b++) pair_vectors(values[b].at, heads_.size, pairs + b * heads_.size * LANES);
      return tile_values(*room.tiles, room.shares + some.first * LANES, some.end - some.first, room.queries * LANES, pairs,
                         heads_.size, count, room.parts + some.first * width_, width_);
    }
#endif
    if (cache_.form == KV_BF16) add_values<KV_BF16>(room, some, weights, values, count);
    else if (cache_.form == KV_INT8) add_values<KV_INT8>(room, some, weights, values, count);
    else add_values<KV_FP8>(room, some, weights, values, count);
  }

  template <KVForm FORM>
  static Floats load_value(const char* at, int i) {
    if constexpr (FORM == KV_BF16) return load_bf16(reinterpret_cast<const bf16*>(at) + i);
    else return load_code(FORM, at + i);
  }

  // Values that several tiles of queries need are made float32 once; those that one tile needs, on the way.
  template <KVForm FORM>
  void add_values(const Room& room, Some some, const float* weights, const Sixteen* values, int count) const {
    int size = heads_.size;
    auto add_all = [&](auto value) {
      in_steps<TALL>(0, size / LANES, [&](int part, auto wide) {
        in_steps<TALL>(some.first, some.end, [&](int q, auto tall) {
          add_up<tall(), wide()>(weights + q * LANES, room.queries * LANES, count, room.parts + q * width_ + part * LANES,
                                 [&](int b, int k, int d) { return value(b, k, (part + d) * LANES); });
        });
      });
    };
    if (some.end - some.first <= TALL)
      return add_all([&](int b, int k, int i) { return load_value<FORM>(values[b].at[k], i); });
    for (int b = 0; b < count; b++)
      for (int k = 0; k < LANES; k++)
        for (int i = 0; i < size; i += LANES)
          store(room.values + (b * LANES + k) * size + i, load_value<FORM>(values[b].at[k], i));
    add_all([&](int b, int k, int i) { return load(room.values + (b * LANES + k) * size + i); });
  }

  // Adds to D blocks of numbers of Q queries' sums.
  template <int Q, int D, class Value>
  void add_up(const float* weights, int stride, int count, float* sums, Value value) const {
    Floats sum[Q][D];
    for (int q = 0; q < Q; q++)
      for (int d = 0; d < D; d++) sum[q][d] = load(sums + q * width_ + d * LANES);
    for (int b = 0; b < count; b++, weights += stride)
      for (int k = 0; k < LANES; k++) {
        Floats values[D];
        for (int d = 0; d < D; d++) values[d] = value(b, k, d);
        for (int q = 0; q < Q; q++) {
          Floats weight = spread(weights[q * LANES + k]);
          for (int d = 0; d < D; d++) sum[q][d] = fma(weight, values[d], sum[q][d]);
        }
      }
    for (int q = 0; q < Q; q++)
      for (int d = 0; d < D; d++) store(sums + q * width_ + d * LANES, sum[q][d]);
  }

  const Cache& cache_;
  const Heads& heads_;
  const Places& places_;
  Reader reader_;
  const bf16* q_;
  int64_t q_stride_;
  bf16* out_;
  int64_t out_stride_, window_;
  bool chunks_;
  const bf16* sinks_;
  float* parts_;
  int words_, groups_;
  int64_t width_;  // of a part
  bool matrix_;
};

}  // namespace sametoken
