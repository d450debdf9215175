// Improving search on the CPU: lowers the work of a grouping by swaps of two queries inside one window.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "search/greedy.hpp"

namespace pageweaver::search {

// Members of a group are counted in one byte.
inline constexpr int64_t kMaxGroup = 255;

struct Work {
    int64_t visits = 0;  // Eq. 3: pages of every group's union, summed
    int64_t rounds = 0;  // Eq. 4: pages of every subgroup's union, summed
};

class WindowImprover;

// One request and KV head. Groups are counted from each window's start and subgroups from each group's; a
// swap never leaves its window. All of a window's state lives in its own WindowImprover, so threads share
// nothing.
class Improver {
  public:
    // pages: [rows, topk] as in greedy_order; order: [rows], a bijection inside every window. threads: at
    // most this many, 0 for one per hardware thread.
    Improver(const int32_t* pages, int64_t rows, int64_t topk, const int32_t* order, int64_t window,
             int64_t group, int64_t subgroup, Objective objective, uint64_t seed, int threads);
    ~Improver();

    // Works for about `seconds`. First swaps until no swap of any window helps, the same for any slicing of
    // the time and any number of threads; then, with `restarts`, perturbs and improves again until the time
    // is up. Returns whether nothing is left to do: without `restarts` that no swap helps, with it that the
    // lower bound is reached everywhere.
    bool run(double seconds, bool restarts);

    int64_t rows() const { return rows_; }
    // [rows]; between calls of run() this is the best order found.
    void order(int32_t* out) const;
    // Kept up by the swaps' changes, never counted anew.
    Work work() const;
    // No order inside these windows has less: a group holds at most G of the n_p queries that selected page
    // p, so visits >= sum_p ceil(n_p / G) per window, and likewise rounds with the subgroup's size.
    Work bound() const;

  private:
    int64_t rows_;
    int threads_;
    std::vector<std::unique_ptr<WindowImprover>> windows_;
};

}  // namespace pageweaver::search
