// Trees of guesses, level by level: the children of a frontier, the best of them as the next one, and the best of all.
//
// Source: `sametoken.drafters.tree` and `rank` of `sametoken.speculation.sampling`, which say what is guessed; scores
// differ from theirs in the last bits, so a tree does where two guesses all but tie.
#pragma once
#include <numeric>

#include "draw.h"

namespace sametoken {

// What trees may become, and what they became.
struct Growth {
  int32_t branches, levels, most;       // children of a node, and nodes of a level that are expanded; `most` guesses
  const int32_t *limits, *budgets;      // [batch] longest path, and guesses that are kept
  int64_t *tokens, *parents, *written;  // [batch][1 + most] drafts, root first, padding last; `written`: where a node's
                                        // keys and values lie past the row's length, -1 where there are none
  int32_t nodes;                        // of the largest draft
};

constexpr float LOWEST = -87;  // the least exponent that is told from lower ones

struct Guess {
  int64_t token;
  float score;  // log of its share in the race; -infinity where there is none, and the token is padding
};

// The least weight inside the nucleus of weights in (0, 1], padded to whole vectors with zeros.
inline float least_of_nucleus(const float* weights, int64_t size, float nucleus) {
  float wanted = std::max(nucleus * mass_above(weights, size, 0), 1e-30f), found;
  uint32_t low = 0, high = 0x3f800000;  // bits of 0 and 1; floats of one sign are ordered as their bits are
  while (low < high) {
    uint32_t middle = (low + high) / 2;
    std::memcpy(&found, &middle, 4);
    if (mass_above(weights, size, found) < wanted) high = middle;
    else low = middle + 1;
  }
  std::memcpy(&found, &low, 4);
  return found;
}

// The `count` tokens that row `row` most likely draws `later` than its first draw, best first. Scores and `ids` are
// readable up to whole vectors.
inline void rank(const float* scores, const int32_t* ids, int64_t size, const Draw& draw, int row, int64_t later,
                 int count, Guess* found) {
  int64_t stride = padded(size, LANES);
  thread_local Scratch scratch;
  float* shares = reinterpret_cast<float*>(scratch.reserve(size_t(stride) * 8));
  float* weights = shares + stride;
  float peak = scores[greatest(scores, size)], temperature = column(draw.temperature, row, 1.0f);
  float floor = least_kept(scores, size, peak, temperature, draw, row, shares);
  Floats least = spread(floor);
  Floats top = spread(peak), sharpness = spread(1.0f / temperature), lowest = spread(LOWEST);
  for (int64_t i = 0; i < size; i += LANES) {
    Floats score = load(scores + i), cost = mul(sub(score, top), sharpness);
    store(weights + i, where_less(score, least, zeros(), where_less(cost, lowest, zeros(), exponential(cost))));
  }
  std::fill(weights + size, weights + stride, 0.0f);
  float nucleus = float(column(draw.top_p, row, 1.0));
  Floats inside = spread(nucleus < 1 ? least_of_nucleus(weights, size, nucleus) : 0.0f), sum = zeros();
  bool noisy = draw.seeds != nullptr && column(draw.loudness, row, 1.0f) != 0;
  Noise noise(noisy ? draw.seeds[row] : 0, noisy ? draw.positions[row] + later : 0);
  for (int64_t i = 0; i < size; i += LANES) {
    Floats weight = load(weights + i);
    Floats share = where_less(weight, inside, zeros(), noisy ? divide(weight, noise.of(load_ints(ids + i))) : weight);
    store(shares + i, share);
    sum = add(sum, share);
  }
  float total = lane_sum(sum);
  int real = 0;
  for (; real < count; real++) {
    int64_t best = greatest(shares, size);
    if (!(shares[best] > 0 && shares[best] <= total)) break;
    found[real] = {ids[best], std::log(shares[best] / total)};
    shares[best] = -1;  // taken
  }
  // What is left weighs too little for a float: the greatest scores, which noise would hardly reorder.
  float* left = weights;
  for (int64_t i = 0; i < size && real < count; i++)
    left[i] = shares[i] == 0 && nucleus >= 1 && scores[i] >= floor ? scores[i] : -INFINITY;
  for (; real < count; real++) {
    int64_t best = greatest(left, size);
    float score = (left[best] - peak) / temperature - std::log(total);
    found[real] = std::isfinite(score) ? Guess{ids[best], score} : Guess{-1, -INFINITY};
    left[best] = -INFINITY;
  }
}

// One row's tree under growth: all candidates so far, and the frontier that is expanded next.
class Tree {
 public:
  explicit Tree(int64_t pending) : tokens_{pending}, parents_{-1}, scores_{0}, places_{-1}, frontier_{0}, origin_{0} {}

  // Adds `branches` children of each node of the frontier, and takes the best of them as the next frontier.
  void grow(const Guess* guesses, int branches, bool ended) {
    int first = int(tokens_.size()), count = int(frontier_.size()) * branches;
    for (int i = 0; i < count; i++) {
      int parent = frontier_[size_t(i / branches)];
      tokens_.push_back(guesses[i].token);
      parents_.push_back(parent);
      scores_.push_back(ended ? -INFINITY : scores_[size_t(parent)] + guesses[i].score);
      places_.push_back(-1);
    }
    frontier_ = best(first, branches);
    origin_.clear();
    for (int node : frontier_) origin_.push_back((node - first) / branches);
  }

  // The frontier takes its places in the cache: its tokens, padding for nodes that cannot come true.
  void enter(int64_t* tokens) {
    for (size_t f = 0; f < frontier_.size(); f++) {
      size_t node = size_t(frontier_[f]);
      tokens[f] = scores_[node] > -INFINITY ? tokens_[node] : -1;
      int above = places_[size_t(parents_[node])];
      paths_.push_back(above < 0 ? std::vector<int32_t>{} : paths_[size_t(above)]);
      places_[node] = int32_t(paths_.size()) - 1;
      paths_.back().push_back(places_[node]);
    }
  }

  int entered() const { return int(paths_.size()); }
  int origin(int f) const { return origin_[size_t(f)]; }  // whose child a node of the frontier is: a place in the one before

  // [entered][entered] of all nodes that ran, from zeros: whether one lies on another's path.
  void ancestors(uint8_t* mask) const {
    for (const auto& path : paths_) {
      for (int32_t node : path) mask[node] = 1;
      mask += paths_.size();
    }
  }

  // The root and its `budget` best candidates. A child never scores above its parent and a tie goes to the earlier
  // candidate, so they are a tree.
  int draft(int budget, int most, int64_t* tokens, int64_t* parents, int64_t* written) const {
    std::vector<int> chosen = best(1, std::min(budget, most));
    while (!chosen.empty() && scores_[size_t(chosen.back())] == -INFINITY) chosen.pop_back();
    chosen.push_back(0);
    std::sort(chosen.begin(), chosen.end());
    for (int n = 0; n <= most; n++) tokens[n] = -1, parents[n] = n - 1, written[n] = -1;
    std::vector<int> node(tokens_.size(), -1);
    for (size_t n = 0; n < chosen.size(); n++) {
      size_t from = size_t(chosen[n]);
      node[from] = int(n);
      tokens[n] = tokens_[from];
      parents[n] = n == 0 ? -1 : node[size_t(parents_[from])];
      written[n] = places_[from];
    }
    return int(chosen.size());
  }

 private:
  // The `count` best candidates from `first` on, best first, the earlier of equals first.
  std::vector<int> best(int first, int count) const {
    std::vector<int> all(tokens_.size() - size_t(first));
    std::iota(all.begin(), all.end(), first);
    std::stable_sort(all.begin(), all.end(), [&](int a, int b) { return scores_[size_t(a)] > scores_[size_t(b)]; });
    all.resize(std::min(all.size(), size_t(count)));
    return all;
  }

  std::vector<int64_t> tokens_;
  std::vector<int32_t> parents_;
  std::vector<float> scores_;
  std::vector<int32_t> places_;               // among the nodes that ran, -1 for those that did not
  std::vector<std::vector<int32_t>> paths_;   // of the nodes that ran, root side first, each with itself
  std::vector<int> frontier_, origin_;
};

}  // namespace sametoken
