// Chains of guesses that end where the next guess is not worth its time, and the siblings beside them that are.
//
// Each level gives the candidates of one draw, best first. The first goes on with the chain, the others are leaves. A
// guess is worth the chance that its whole path comes true times its row's weight. That never grows along a chain, nor
// among the candidates of a level. So what is worth its verification is a tree, and rows that stopped need not be looked
// at again. Source of the rule: `sametoken.control.worth`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace sametoken {

// What guesses of B rows are worth, what their time is worth in the same unit, and the drafts that follow.
struct Worth {
  const float* chances;                        // [ranks][2][bins] of a candidate by its share: greedy rows, sampled ones
  const float* typical;                        // [ranks][2] of candidates that were not drawn yet
  const int32_t *sampled, *limits, *siblings;  // [B] which table; longest chain; most siblings
  const float* weights;                        // [B] of a token
  float verify, guess, level;                  // of the time to verify a guess, to make one, and of a draft forward
  int32_t bins, ranks, most;                   // candidates of a level; `most` guesses of a draft
  int64_t* candidates;                         // [B][levels][ranks] their tokens, -1 for none
  int64_t *parents, *written;                  // [B][1 + most] of the drafts; where keys and values lie, as in grow.h
  int32_t *made, *kept;                        // [B] levels that were drawn; [B][levels] candidates in the draft
};

class Chains {
 public:
  // shares [batch][levels][ranks] of the candidates, 0 for none.
  Chains(const Worth& worth, const float* shares, int batch, int levels)
      : worth_(worth), shares_(shares), levels_(levels), paths_(size_t(batch), 1.0f),
        values_(size_t(batch * levels * worth.ranks)) {
    std::fill(worth.made, worth.made + batch, 0);
    std::fill(worth.kept, worth.kept + batch * levels, 0);
    std::fill(worth.candidates, worth.candidates + batch * levels * worth.ranks, int64_t(-1));
  }

  // The candidates of the next level of a row were drawn.
  void add(int row) {
    int64_t at = place(row, worth_.made[row]++);
    float first = 1, least = 1, before = paths_[size_t(row)] * worth_.weights[row];
    for (int rank = 0; rank < worth_.ranks; rank++) {
      least = std::min(least, shares_[at + rank] > 0 ? chance(row, rank, shares_[at + rank]) : 0);
      if (rank == 0) first = least;
      values_[size_t(at + rank)] = before * least;
    }
    paths_[size_t(row)] *= first;
  }

  // Leaves the rows for which one more level is expected to pay.
  void go_on(std::vector<int>& rows) const {
    float gain = 0;
    auto ends = [&](int row) {
      float value = -worth_.guess, path = paths_[size_t(row)] * worth_.weights[row];
      for (int rank = 0; rank < (worth_.siblings[row] > 0 ? worth_.ranks : 1); rank++)
        value += std::max(0.0f, path * worth_.typical[2 * rank + worth_.sampled[row]] - worth_.verify);
      if (worth_.made[row] >= worth_.limits[row] || value <= 0) return true;
      gain += value;
      return false;
    };
    rows.erase(std::remove_if(rows.begin(), rows.end(), ends), rows.end());
    if (gain <= worth_.level) rows.clear();
  }

  // Writes a row's draft after its root tokens[0]: the chain, the siblings in the order of their parents, and padding.
  void draft(int row, int64_t* tokens) const {
    int64_t first = int64_t(row) * (1 + worth_.most);
    int64_t *parents = worth_.parents + first, *written = worth_.written + first;
    for (int n = 0; n <= worth_.most; n++) parents[n] = n - 1, written[n] = -1;
    std::fill(tokens + 1, tokens + 1 + worth_.most, int64_t(-1));
    int32_t* kept = worth_.kept + int64_t(row) * levels_;
    int nodes = 1, made = worth_.made[row];
    for (int level = 0; level < made && values_[size_t(place(row, level))] > worth_.verify; level++, nodes++) {
      tokens[nodes] = worth_.candidates[place(row, level)];
      written[nodes] = nodes < made ? nodes - 1 : -1;
      kept[level] = 1;
    }
    std::vector<int64_t> others;
    for (int level = 0; level < nodes - 1; level++)
      for (int64_t at = place(row, level) + 1; at < place(row, level + 1); at++)
        if (values_[size_t(at)] > worth_.verify) others.push_back(at);
    std::stable_sort(others.begin(), others.end(),
                     [&](int64_t a, int64_t b) { return values_[size_t(a)] > values_[size_t(b)]; });
    others.resize(std::min(others.size(), size_t(worth_.siblings[row])));
    std::sort(others.begin(), others.end());
    for (int64_t at : others) {
      int level = int((at - place(row, 0)) / worth_.ranks);
      tokens[nodes] = worth_.candidates[at];
      parents[nodes++] = level;
      kept[level]++;
    }
  }

 private:
  int64_t place(int row, int level) const { return (int64_t(row) * levels_ + level) * worth_.ranks; }

  // Linear between the middles of the bins. The share of a candidate is at most that of equal ones before it.
  float chance(int row, int rank, float share) const {
    const float* table = worth_.chances + int64_t(2 * rank + worth_.sampled[row]) * worth_.bins;
    float at = share * float((rank + 1) * worth_.bins) - 0.5f;
    at = std::min(std::max(at, 0.0f), float(worth_.bins - 1));
    int below = std::min(int(at), worth_.bins - 2);
    return table[below] + (at - float(below)) * (table[below + 1] - table[below]);
  }

  const Worth& worth_;
  const float* shares_;
  int levels_;
  std::vector<float> paths_, values_;
};

}  // namespace sametoken
