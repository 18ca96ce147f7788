// What a task of attention keeps in memory: queries, scores and weights of a chunk of keys, and results.
#pragma once
#include <algorithm>

#include "kv_codes.h"
#include "rows.h"
#include "simd_amx.h"
#include "sixteen.h"
#include "team.h"

namespace sametoken {

// What a task keeps. Queries lie by key head, then node. Scores of a chunk lie by block of 16 keys: [block][query][16],
// so that all of them are passed in order.
struct Room {
  static constexpr int SIDE = Reader::SIDE;  // blocks of 16 keys side by side

  int queries;
  int64_t begin = 0, end = INT64_MAX;   // keys that all queries see
  float *scores, *most, *total;         // greatest score and sum of weights, by lane, of a query
  float *parts, *joined;                // [query][part_floats] of a chunk, and of all chunks so far
  float* values;                        // [SIDE * 16][size], of the keys at hand
  uint32_t* turned;                     // [SIDE][words][16] the keys at hand, in the same place
  Query* split;                         // [query], of codes
  char* asked;                          // [query][Query::bytes] queries, bfloat16 numbers or codes
  bf16* shares;                         // [SIDE][query][16] weights for the matrix unit
  TileShape* tiles;

  bool all_see(int64_t key) const { return begin <= key && key + LANES <= end; }  // 16 keys

  void take_from(Scratch& memory, int count, int size, int64_t part_floats, int32_t form) {
    queries = count;
    int64_t hand = SIDE * LANES * std::max(size, size / 2 + LANES);
    int64_t floats = queries * (CHUNK + 2 * part_floats + (2 + SIDE) * LANES) + hand;
    char* at = memory.reserve(size_t(floats) * 4 + size_t(queries) * (sizeof(Query) + Query::bytes(form, size)) + 10 * 64);
    take(at, values, hand);
    turned = reinterpret_cast<uint32_t*>(values);
    take(at, most, queries * LANES);
    take(at, total, queries * LANES);
    take(at, parts, queries * part_floats);
    take(at, joined, queries * part_floats);
    take(at, asked, queries * int64_t(Query::bytes(form, size)));
    take(at, shares, SIDE * queries * LANES);
    take(at, split, form == KV_BF16 ? 0 : queries);
    take(at, scores, queries * CHUNK);
  }
};

}  // namespace sametoken
