// Bounded greedy grouping (Eq. 6). Windows are independent, so threads take whole windows.
//
// A window first renames its pages to 0 .. P-1 and inverts them: page -> rows that selected it. Every
// candidate row keeps its cost, the number of its pages that the open group has not read yet. Taking a row
// lowers, for each page that is new to the group, the cost of the rows that share the page; nothing is
// counted again. A step is then one scan for the smallest cost over a plain array of ints and a few short
// list walks.
//
// With Objective::kRounds the ordering is lexicographic (new pages of the subgroup, new pages of the group),
// held as one int, subgroup_cost * (topk + 1) + group_cost. A subgroup's first row is chosen by group_cost
// alone.

#include "search/greedy.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace pageweaver::search {
namespace {

// A taken row's cost: above all others even after every decrement that one group can cause.
constexpr int32_t kTaken = 1 << 30;
static_assert(int64_t{kMaxTopk} * (kMaxTopk + 2) < kTaken / 2, "a key must stay clear of kTaken");

// The lowest index of the smallest value. Two passes, because each of them vectorises.
int32_t first_minimum(const std::vector<int32_t>& values) {
    const int32_t* data = values.data();
    const auto count = static_cast<int32_t>(values.size());
    int32_t smallest = data[0];
    for (int32_t i = 1; i < count; ++i) smallest = std::min(smallest, data[i]);
    return static_cast<int32_t>(std::find(data, data + count, smallest) - data);
}

// One thread's scratch, reused from window to window.
class WindowGreedy {
  public:
    WindowGreedy(int64_t topk, int64_t group, int64_t subgroup, Objective objective)
        : topk_(topk), group_(group), subgroup_(subgroup), by_rounds_(objective == Objective::kRounds) {}

    // pages: [rows, topk] of this window; order: [rows], row numbers that start at first_row.
    void run(const int32_t* pages, int32_t rows, int32_t first_row, int32_t* order) {
        index(pages, rows);
        invert();
        in_group_.assign(num_pages_, 0);
        in_subgroup_.assign(num_pages_, 0);
        group_stamp_ = subgroup_stamp_ = 0;
        degree_.resize(rows);
        for (int32_t row = 0; row < rows; ++row)
            degree_[row] = static_cast<int32_t>(row_begin_[row + 1] - row_begin_[row]);
        start_cost_ = degree_;

        for (int32_t slot = 0; slot < rows; ++slot) {
            const int64_t in_group = slot % group_;
            const bool opens_subgroup = in_group % subgroup_ == 0;
            if (in_group == 0) open_group();
            if (by_rounds_ && opens_subgroup) open_subgroup();
            const int32_t row = first_minimum(by_rounds_ && !opens_subgroup ? key_ : group_cost_);
            order[slot] = first_row + row;
            take(row);
        }
    }

  private:
    // Renames pages by an open-addressing table and lists each row's distinct pages.
    void index(const int32_t* pages, int32_t rows) {
        const int64_t entries = rows * topk_;
        int bits = 4;
        while ((int64_t{1} << bits) < 2 * entries) ++bits;
        const auto mask = static_cast<uint32_t>((int64_t{1} << bits) - 1);
        table_.assign(size_t{mask} + 1, {-1, 0});
        last_row_.clear();
        row_pages_.clear();
        row_begin_.assign(1, 0);
        num_pages_ = 0;
        for (int32_t row = 0; row < rows; ++row) {
            for (int64_t k = 0; k < topk_; ++k) {
                const int32_t page = pages[row * topk_ + k];
                if (page < 0) continue;
                // Fibonacci hashing: consecutive page ids spread over the table's high bits.
                uint32_t place = static_cast<uint32_t>(
                    (static_cast<uint64_t>(page) * 0x9E3779B97F4A7C15ull) >> (64 - bits));
                while (table_[place].page >= 0 && table_[place].page != page) place = (place + 1) & mask;
                if (table_[place].page < 0) {
                    table_[place] = {page, num_pages_++};
                    last_row_.push_back(-1);
                }
                const int32_t local = table_[place].local;
                if (last_row_[local] == row) continue;  // a duplicate in this row
                last_row_[local] = row;
                row_pages_.push_back(local);
            }
            row_begin_.push_back(static_cast<int64_t>(row_pages_.size()));
        }
    }

    void invert() {
        page_begin_.assign(num_pages_ + 1, 0);
        for (const int32_t local : row_pages_) ++page_begin_[local + 1];
        for (int32_t page = 0; page < num_pages_; ++page) page_begin_[page + 1] += page_begin_[page];
        page_rows_.resize(row_pages_.size());
        fill_.assign(page_begin_.begin(), page_begin_.end() - 1);
        const auto rows = static_cast<int32_t>(row_begin_.size()) - 1;
        for (int32_t row = 0; row < rows; ++row)
            for (int64_t at = row_begin_[row]; at < row_begin_[row + 1]; ++at)
                page_rows_[fill_[row_pages_[at]]++] = row;
    }

    void open_group() {
        ++group_stamp_;
        group_cost_ = start_cost_;
    }

    void open_subgroup() {
        ++subgroup_stamp_;
        const auto weight = static_cast<int32_t>(topk_ + 1);
        key_.resize(group_cost_.size());
        for (size_t row = 0; row < key_.size(); ++row) key_[row] = degree_[row] * weight + group_cost_[row];
    }

    void take(int32_t row) {
        const auto weight = static_cast<int32_t>(topk_ + 1);
        start_cost_[row] = group_cost_[row] = kTaken;
        degree_[row] = 0;
        if (by_rounds_) key_[row] = kTaken;
        for (int64_t at = row_begin_[row]; at < row_begin_[row + 1]; ++at) {
            const int32_t page = row_pages_[at];
            const bool new_to_group = in_group_[page] != group_stamp_;
            const bool new_to_subgroup = by_rounds_ && in_subgroup_[page] != subgroup_stamp_;
            in_group_[page] = group_stamp_;
            in_subgroup_[page] = subgroup_stamp_;
            const int64_t begin = page_begin_[page], end = page_begin_[page + 1];
            if (new_to_group)
                for (int64_t i = begin; i < end; ++i) --group_cost_[page_rows_[i]];
            if (new_to_subgroup) {
                // A page that is new to the group is new to its open subgroup as well.
                const int32_t drop = weight + (new_to_group ? 1 : 0);
                for (int64_t i = begin; i < end; ++i) key_[page_rows_[i]] -= drop;
            }
        }
    }

    struct Entry {
        int32_t page;
        int32_t local;
    };

    const int64_t topk_, group_, subgroup_;
    const bool by_rounds_;
    int32_t num_pages_ = 0;
    int32_t group_stamp_ = 0, subgroup_stamp_ = 0;
    std::vector<Entry> table_;
    std::vector<int32_t> last_row_;                       // [num_pages] the last row that listed the page
    std::vector<int64_t> row_begin_, page_begin_, fill_;  // offsets into the two lists below
    std::vector<int32_t> row_pages_, page_rows_;
    std::vector<int32_t> in_group_, in_subgroup_;  // [num_pages] stamp of the group that last read the page
    std::vector<int32_t> degree_, start_cost_, group_cost_, key_;  // [rows]
};

}  // namespace

void greedy_order(const int32_t* pages, int64_t rows, int64_t topk, int64_t window, int64_t group,
                  int64_t subgroup, Objective objective, int threads, int32_t* order) {
    if (rows == 0) return;
    window = std::min(window, rows);
    const int64_t num_windows = (rows + window - 1) / window;
    if (threads == 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    threads = static_cast<int>(std::min<int64_t>(threads, num_windows));

    std::atomic<int64_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto work = [&] {
        try {
            WindowGreedy greedy(topk, group, subgroup, objective);
            for (int64_t w = next++; w < num_windows; w = next++) {
                const int64_t begin = w * window;
                const auto count = static_cast<int32_t>(std::min(window, rows - begin));
                greedy.run(pages + begin * topk, count, static_cast<int32_t>(begin), order + begin);
            }
        } catch (...) {
            const std::lock_guard<std::mutex> lock(failure_mutex);
            failure = std::current_exception();
            next = num_windows;
        }
    };

    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; ++i) {
        try {
            helpers.emplace_back(work);
        } catch (const std::system_error&) {
            break;  // no more threads to be had: those that run take all windows
        }
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace pageweaver::search
