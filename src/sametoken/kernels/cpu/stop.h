// Where chains of guesses end: a row goes on while its next guess is expected to be worth more than the time that it takes.
//
// The chance that a whole path comes true never grows along a chain. So the guesses that are worth their verification are
// the first ones of each row, and rows that stopped need not be looked at again. Source of the rule: `sametoken.control.worth`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace sametoken {

// What guesses of B rows are worth, and what their time is worth in the same unit.
struct Worth {
  const float* chances;              // [2][bins] that a guess comes true, by its share: of greedy rows, of sampled ones
  const int32_t *sampled, *limits;   // [B] which table; longest chain
  const float* weights;              // [B] of a token
  int32_t* made;                     // [B] guesses that were made, kept or not
  float verify, guess, level;        // of the time to verify a guess, to make one beside others, and of a draft forward
  float typical[2];                  // chance of a guess that was not made yet
  int32_t bins;
};

class Chains {
 public:
  explicit Chains(const Worth& worth, int batch) : kept(size_t(batch), 0), worth_(worth), paths_(size_t(batch), 1.0f) {
    std::fill(worth.made, worth.made + batch, 0);
  }

  std::vector<int32_t> kept;  // guesses of each row that are worth their verification

  // The next guess of a row won its draw with this share.
  void add(int row, float share) {
    paths_[size_t(row)] *= chance(row, share);
    if (paths_[size_t(row)] * worth_.weights[row] > worth_.verify) kept[size_t(row)] = worth_.made[row] + 1;
    worth_.made[row]++;
  }

  // Leaves the rows for which one more guess is expected to pay.
  void go_on(std::vector<int>& rows) const {
    float gain = 0;
    auto ends = [&](int row) {
      float value = paths_[size_t(row)] * worth_.typical[worth_.sampled[row]] * worth_.weights[row];
      value -= worth_.verify + worth_.guess;
      if (worth_.made[row] >= worth_.limits[row] || value <= 0) return true;
      gain += value;
      return false;
    };
    rows.erase(std::remove_if(rows.begin(), rows.end(), ends), rows.end());
    if (gain <= worth_.level) rows.clear();
  }

 private:
  // Linear between the middles of the bins.
  float chance(int row, float share) const {
    const float* table = worth_.chances + int64_t(worth_.sampled[row]) * worth_.bins;
    float at = std::min(std::max(share * float(worth_.bins) - 0.5f, 0.0f), float(worth_.bins - 1));
    int below = std::min(int(at), worth_.bins - 2);
    return table[below] + (at - float(below)) * (table[below + 1] - table[below]);
  }

  const Worth& worth_;
  std::vector<float> paths_;
};

}  // namespace sametoken
