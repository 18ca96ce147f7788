// Attention over cache pages where they lie: the committed prefix of a row, then each node's own path.
//
// Keys are visited in the order of their positions, in blocks of 16 aligned to position 0, a tree node's path as if it
// stood side by side. So a query's bits depend on its own keys alone: not on pages, tree shape, or other queries.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "kv_codes.h"
#include "pointwise.h"
#include "team.h"

namespace sametoken {

// Keys or values of one layer.
struct Plane {
  char* vectors;  // [slots][kv heads][size] numbers or codes
  float* scales;  // [kv heads][slots] of the codes, null for numbers
};

struct Cache {  // of one layer
  Plane keys, values;
  const int64_t* table;  // [rows][pages of a row] page numbers
  int64_t table_stride, page_size, slots;
  int32_t form;
};

// Where sixteen stored vectors of a head lie, and what their codes are to be multiplied with.
struct Sixteen {
  const char* at[LANES];
  float scale[LANES];
};

// Trees of `total` nodes in `batch` rows, of which the last `nodes` are computed; all arrays contiguous.
struct Span {
  int32_t batch, nodes, total;
  const int64_t *rows, *starts;  // [batch] rows of the page table, and their committed lengths
  const uint8_t* ancestors;      // [batch][total][total] whether a node lies on another's path; null: all are chains
};

struct Heads {
  int32_t query, key, size;
  float scale, cap;  // of scores: what products are multiplied by, 0 for 1 / sqrt(size); the cap, 0 for none
  int groups() const { return query / key; }
};

inline int64_t slot_of(const Cache& cache, int64_t row, int64_t index) {
  return cache.table[row * cache.table_stride + index / cache.page_size] * cache.page_size + index % cache.page_size;
}

// Stores a vector of `heads.size` numbers.
inline void write(const Cache& cache, const Heads& heads, const Plane& plane, int64_t slot, int head, const bf16* x) {
  char* to = plane.vectors + (slot * heads.key + head) * heads.size * kv_bytes(cache.form);
  if (cache.form == KV_BF16) std::memcpy(to, x, size_t(heads.size) * 2);
  else plane.scales[head * cache.slots + slot] = encode(cache.form, x, heads.size, to);
}

// The nodes that are computed, row by row: where each stands and what it sees past the committed prefix.
struct Places {
  std::vector<int64_t> position, slot;           // [tokens]
  std::vector<std::vector<int32_t>> path;        // [tokens] nodes on the path, root first; empty in rows that are chains
  std::vector<uint8_t> chain;                    // [rows of all spans]

  Places(const Cache& cache, const Span* spans, int count) {
    for (int s = 0; s < count; s++)
      for (int b = 0; b < spans[s].batch; b++) add(cache, spans[s], b);
  }

 private:
  void add(const Cache& cache, const Span& span, int b) {
    const uint8_t* ancestors = span.ancestors + int64_t(b) * span.total * span.total;
    bool straight = true;
    for (int n = 0; span.ancestors != nullptr && n < span.total && straight; n++)
      for (int m = 0; m <= n && straight; m++) straight = ancestors[n * span.total + m];
    chain.push_back(straight);
    for (int n = span.total - span.nodes; n < span.total; n++) {
      std::vector<int32_t> nodes;
      int64_t depth = n;
      if (!straight) {
        for (int m = 0; m <= n; m++)
          if (ancestors[n * span.total + m]) nodes.push_back(m);
        depth = int64_t(nodes.size()) - 1;
      }
      position.push_back(span.starts[b] + depth);
      slot.push_back(slot_of(cache, span.rows[b], span.starts[b] + n));
      path.push_back(std::move(nodes));
    }
  }
};

// Queries of one key head that are attended for together: some nodes of one row, all their query heads.
struct Block {
  const Span* span;
  int row, token, nodes;  // row of the span; first of its tokens in the batch
  bool chain;
};

// Blocks of all spans; a chain's are short enough to share keys in the first-level cache, a tree's are whole.
inline std::vector<Block> blocks_of(const Span* spans, int count, const Places& places, int groups) {
  std::vector<Block> blocks;
  int token = 0, row = 0;
  int height = groups >= 16 ? 1 : 16 / groups;
  for (int s = 0; s < count; s++)
    for (int b = 0; b < spans[s].batch; b++, row++)
      for (int n = 0; n < spans[s].nodes; n += height) {
        int nodes = spans[s].nodes - n < height ? spans[s].nodes - n : height;
        blocks.push_back({&spans[s], b, token, nodes, places.chain[size_t(row)] != 0});
        token += nodes;
      }
  return blocks;
}

class Attention {
 public:
  // q: [tokens][q_stride] rotated queries; out: [tokens][out_stride]; window: keys a query sees, 0 for all, or the
  // length of `chunks`, of which a query sees its own up to itself; sinks: a score of each query head that takes part in
  // its softmax without a key, or null.
  Attention(const Cache& cache, const Heads& heads, const Places& places, const bf16* q, int64_t q_stride, bf16* out,
            int64_t out_stride, int64_t window, bool chunks, const bf16* sinks)
      : cache_(cache), heads_(heads), places_(places), q_(q), q_stride_(q_stride), out_(out), out_stride_(out_stride),
        window_(window), chunks_(chunks), sinks_(sinks), words_(heads.size / 2), groups_(heads.groups()) {}

  void operator()(const Block& block, int head, Scratch& memory) const {
    int queries = block.nodes * groups_;
    int64_t first = INT64_MAX, last = 0;  // keys that any query of the block sees
    for (int n = 0; n < block.nodes; n++) {
      first = std::min(first, begin_of(block.token + n));
      last = std::max(last, end_of(block.token + n));
    }
    first = first / LANES * LANES;
    int64_t width = (last - first + LANES - 1) / LANES * LANES;
    size_t floats = size_t(queries) * size_t(width + heads_.size) + size_t(words_ + LANES) * LANES;
    size_t asked = cache_.form == KV_BF16 ? 0 : size_t(queries) * (sizeof(Query) + Query::bytes(heads_.size));
    float* scores = reinterpret_cast<float*>(memory.reserve(floats * 4 + asked));
    float* sums = scores + int64_t(queries) * width;
    uint32_t* turned = reinterpret_cast<uint32_t*>(sums + int64_t(queries) * heads_.size);
    Query* split = reinterpret_cast<Query*>(turned + (words_ + LANES) * LANES);
    char* codes = reinterpret_cast<char*>(split + queries);
    std::fill(sums, sums + int64_t(queries) * heads_.size, 0.0f);
    for (int q = 0; q < queries && cache_.form != KV_BF16; q++)
      split[q] = {cache_.form, query_of(block, q, head), heads_.size, codes + size_t(q) * Query::bytes(heads_.size)};

    // Up to here all nodes of the block have the same keys; past it each tree node has its own.
    int64_t shared = block.chain ? last : std::max(first, block.span->starts[block.row] / LANES * LANES);
    Sixteen rows;
    for (int64_t key = first; key < std::min(shared, last); key += LANES) {
      locate(block, 0, key, block.chain ? last : shared, head, cache_.keys, rows);
      score(block, 0, block.nodes, rows, head, turned, split, scores + (key - first), width);
    }
    for (int n = 0; n < block.nodes && !block.chain; n++)
      for (int64_t key = shared; key < end_of(block.token + n); key += LANES) {
        locate(block, n, key, end_of(block.token + n), head, cache_.keys, rows);
        score(block, n, 1, rows, head, turned, split, scores + (key - first), width);
      }
    for (int q = 0; q < queries; q++) soften(block.token + q / groups_, head * groups_ + q % groups_, first, scores + q * width, width);
    for (int64_t key = first; key < std::min(shared, last); key += LANES) {
      locate(block, 0, key, block.chain ? last : shared, head, cache_.values, rows);
      gather(queries, rows, scores + (key - first), width, sums);
    }
    for (int n = 0; n < block.nodes && !block.chain; n++)
      for (int64_t key = shared; key < end_of(block.token + n); key += LANES) {
        locate(block, n, key, end_of(block.token + n), head, cache_.values, rows);
        gather(groups_, rows, scores + n * groups_ * width + (key - first), width, sums + n * groups_ * heads_.size);
      }
    for (int q = 0; q < queries; q++) {
      bf16* to = out_ + (block.token + q / groups_) * out_stride_ + (head * groups_ + q % groups_) * heads_.size;
      for (int i = 0; i < heads_.size; i += LANES) store_bf16(to + i, load(sums + q * heads_.size + i));
    }
  }

 private:
  int64_t end_of(int token) const { return places_.position[size_t(token)] + 1; }
  int64_t begin_of(int token) const {
    if (window_ == 0) return 0;
    int64_t position = places_.position[size_t(token)];
    return chunks_ ? position - position % window_ : std::max(int64_t(0), position + 1 - window_);
  }
  const bf16* query_of(const Block& block, int q, int head) const {
    return q_ + (block.token + q / groups_) * q_stride_ + (head * groups_ + q % groups_) * heads_.size;
  }

  // Where 16 keys from position `key` on lie; positions from `end` on repeat a key that is there, nobody sees them.
  void locate(const Block& block, int node, int64_t key, int64_t end, int head, const Plane& plane, Sixteen& rows) const {
    const Span& span = *block.span;
    int64_t start = span.starts[block.row], bytes = heads_.size * kv_bytes(cache_.form);
    const std::vector<int32_t>& path = places_.path[size_t(block.token + node)];
    for (int i = 0; i < LANES; i++) {
      int64_t position = std::min(key + i, end - 1);
      int64_t index = block.chain || position < start ? position : start + path[size_t(position - start)];
      int64_t slot = slot_of(cache_, span.rows[block.row], index);
      rows.at[i] = plane.vectors + (slot * heads_.key + head) * bytes;
      if (plane.scales != nullptr) rows.scale[i] = plane.scales[head * cache_.slots + slot];
    }
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

  // Scores of 16 keys for all queries of some nodes.
  void score(const Block& block, int node, int nodes, const Sixteen& keys, int head, uint32_t* turned, const Query* split,
             float* scores, int64_t width) const {
    Floats scale = spread(heads_.scale != 0 ? heads_.scale : 1.0f / std::sqrt(float(heads_.size)));
    auto put = [&](int q, Floats score) { store(scores + q * width, heads_.cap != 0 ? capped(score, heads_.cap) : score); };
    if (cache_.form != KV_BF16) scale = mul(scale, load(keys.scale));
    if (cache_.form == KV_INT8) {
      turn(keys.at, words_ / 2, turned);
      for (int i = 0; i < words_ / 2 * LANES; i++) turned[i] ^= 0x80808080;  // as load_int8 wants them
      for (int q = node * groups_; q < (node + nodes) * groups_; q++)
        put(q, mul(split[q].times(turned, words_ / 2), scale));
      return;
    }
    if (cache_.form == KV_FP8) {
      turn(keys.at, words_ / 2, turned + words_ / 2 * LANES);
      for (int word = 0; word < words_ / 2; word++) {  // a word's bytes 0 and 2, then 1 and 3, as the query has them
        Pairs bytes = load_pairs(turned + (words_ / 2 + word) * LANES);
        store_pairs(turned + 2 * word * LANES, any_fp8<0>(bytes));
        store_pairs(turned + (2 * word + 1) * LANES, any_fp8<1>(bytes));
      }
    } else {
      turn(keys.at, words_, turned);
    }
    for (int q = node * groups_; q < (node + nodes) * groups_; q++) {
      const bf16* query = cache_.form == KV_FP8 ? split[q].numbers : query_of(block, q, head);
      Floats even = zeros(), odd = zeros();
      for (int word = 0; word < words_; word += 2) {
        even = dot2(even, load_pairs(turned + word * LANES), spread_pair(dword(query + 2 * word)));
        odd = dot2(odd, load_pairs(turned + (word + 1) * LANES), spread_pair(dword(query + 2 * word + 2)));
      }
      put(q, mul(add(even, odd), scale));
    }
  }

  // Scores into weights that sum to 1; those of keys that the token does not see become 0.
  void soften(int token, int head, int64_t first, float* scores, int64_t width) const {
    int64_t begin = begin_of(token) - first, end = end_of(token) - first;
    int64_t low = begin / LANES * LANES, high = (end + LANES - 1) / LANES * LANES;
    std::fill(scores, scores + begin, 0.0f);
    std::fill(scores + low, scores + begin, -INFINITY);
    std::fill(scores + end, scores + high, -INFINITY);
    Floats most = spread(-INFINITY), sum = zeros();
    for (int64_t i = low; i < high; i += LANES) most = greater(most, load(scores + i));
    float sink = sinks_ == nullptr ? -INFINITY : to_float(sinks_[head]);
    Floats peak = spread(std::max(lane_max(most), sink));
    for (int64_t i = low; i < high; i += LANES) store(scores + i, exponential(sub(load(scores + i), peak)));
    std::fill(scores + low, scores + begin, 0.0f);
    std::fill(scores + end, scores + width, 0.0f);
    for (int64_t i = low; i < high; i += LANES) sum = add(sum, load(scores + i));
    float rest = sinks_ == nullptr ? 0.0f : lane_max(exponential(sub(spread(sink), peak)));
    Floats share = spread(1.0f / (lane_sum(sum) + rest));
    for (int64_t i = low; i < high; i += LANES) store(scores + i, mul(load(scores + i), share));
  }

  // Adds 16 weighted values to the sums of some queries, one key after the other. The weights take on the codes' scales.
  void gather(int queries, const Sixteen& values, float* weights, int64_t width, float* sums) const {
    if (cache_.form == KV_BF16)
      return add_up(queries, weights, width, sums, [&](int k, int i) { return load_bf16(reinterpret_cast<const bf16*>(values.at[k]) + i); });
    for (int q = 0; q < queries; q++) store(weights + q * width, mul(load(weights + q * width), load(values.scale)));
    add_up(queries, weights, width, sums, [&](int k, int i) { return load_code(cache_.form, values.at[k] + i); });
  }

  template <class Load>
  void add_up(int queries, const float* weights, int64_t width, float* sums, Load load_value) const {
    for (int i = 0; i < heads_.size; i += LANES) {
      Floats value[LANES];
      for (int k = 0; k < LANES; k++) value[k] = load_value(k, i);
      for (int q = 0; q < queries; q++) {
        Floats sum = load(sums + q * heads_.size + i);
        for (int k = 0; k < LANES; k++) sum = fma(spread(weights[q * width + k]), value[k], sum);
        store(sums + q * heads_.size + i, sum);
      }
    }
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
