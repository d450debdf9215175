// Bounded greedy grouping on the CPU: Eq. 6 of the method, inside windows of consecutive queries.
#pragma once

#include <cstdint>

namespace pageweaver::search {

enum class Objective {
    kVisits,  // fewest new pages of the open group (Eq. 6)
    kRounds,  // fewest new pages of the open subgroup, then of the open group (Eq. 4's count)
};

// The largest topk for which a candidate's two costs fit one 32-bit key beside the mark of a taken row.
inline constexpr int kMaxTopk = 4096;

// pages: [rows, topk], row-major; a negative entry is no page and a repeated one counts once.
// order: [rows], written: order[slot] = row, a bijection inside every window of `window` rows.
// threads: at most this many, 0 for one per hardware thread; the result does not depend on it.
void greedy_order(const int32_t* pages, int64_t rows, int64_t topk, int64_t window, int64_t group,
                  int64_t subgroup, Objective objective, int threads, int32_t* order);

}  // namespace pageweaver::search
