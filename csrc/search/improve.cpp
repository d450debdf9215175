// Swaps between the groups of one window. With count[p][B], the members of group B that selected page p, the
// swap of row r in group A with row q in group B changes the visits by
//
//     shared(r) + shared(q) - |r & B| - |q & (A \ r)| + |{p in r & q : count[p][B] = 1}|
//
// where shared(r) counts r's pages that another member of its own group selected too: r's other pages leave
// A, q's other pages leave B; r brings to B what neither B nor q's leaving covers, q brings to A likewise.
// For one r the changes of all q of the window come out together: |r & B| by adding r's few rows of count,
// the rest by walking the page -> rows lists of the pages of r and of A. The same holds for rounds, with
// subgroups.
//
// The objective comes first and the other count breaks ties.
//
// A row is examined against the whole window, so once every row was, only members of the two groups that a
// swap changed can have a new helpful swap; a queue holds those. An empty queue is a local optimum. A restart
// swaps a few random pairs of rows that share a page, improves from the groups touched, and is undone swap by
// swap unless the result is at least as good.

#include "search/improve.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

namespace pageweaver::search {
namespace {

using Clock = std::chrono::steady_clock;

// SplitMix64: the same numbers on every platform.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    int64_t below(int64_t count) { return static_cast<int64_t>(next() % static_cast<uint64_t>(count)); }

  private:
    uint64_t next() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    uint64_t state_;
};

// A window's rows and pages, both ways. Pages that one row alone selected cost the same in any order and are
// left out of the lists.
struct Incidence {
    std::vector<int32_t> row_begin, row_pages, page_begin, page_rows;
    int32_t rows = 0, pages = 0;
    int64_t lone = 0;  // pages left out

    Incidence(const int32_t* ids, int32_t num_rows, int64_t topk) : rows(num_rows) {
        std::unordered_map<int32_t, int32_t> local;
        std::vector<int32_t> last_row, count;
        std::vector<std::pair<int32_t, int32_t>> edges;  // (row, local page), distinct
        for (int32_t row = 0; row < rows; ++row) {
            for (int64_t k = 0; k < topk; ++k) {
                const int32_t id = ids[row * topk + k];
                if (id < 0) continue;
                const auto [at, added] = local.try_emplace(id, static_cast<int32_t>(count.size()));
                if (added) {
                    last_row.push_back(-1);
                    count.push_back(0);
                }
                const int32_t page = at->second;
                if (last_row[page] == row) continue;  // a duplicate in this row
                last_row[page] = row;
                ++count[page];
                edges.emplace_back(row, page);
            }
        }
        std::vector<int32_t> kept(count.size(), -1);
        page_begin.assign(1, 0);
        for (size_t page = 0; page < count.size(); ++page) {
            if (count[page] == 1) {
                ++lone;
                continue;
            }
            kept[page] = pages++;
            page_begin.push_back(page_begin.back() + count[page]);
        }
        row_begin.assign(1, 0);
        page_rows.resize(page_begin.back());
        std::vector<int32_t> fill(page_begin.begin(), page_begin.end() - 1);
        size_t at = 0;
        for (int32_t row = 0; row < rows; ++row) {
            for (; at < edges.size() && edges[at].first == row; ++at) {
                const int32_t page = kept[edges[at].second];
                if (page < 0) continue;
                row_pages.push_back(page);
                page_rows[fill[page]++] = row;
            }
            row_begin.push_back(static_cast<int32_t>(row_pages.size()));
        }
    }
};

// The window cut into groups, or into subgroups: "parts" of consecutive slots.
class Level {
  public:
    // part_begin: first slot of every part, then the number of slots.
    Level(const Incidence& on, const std::vector<int32_t>& slot_row, std::vector<int32_t> part_begin)
        : on_(on), begin_(std::move(part_begin)), parts_(static_cast<int32_t>(begin_.size()) - 1) {
        part_.resize(on_.rows);
        shared_.resize(on_.rows);
        hits_.resize(parts_);
        stamp_.assign(on_.pages, 0);
        count_.assign(static_cast<size_t>(on_.pages) * parts_, 0);
        for (int32_t part = 0; part < parts_; ++part)
            for (int32_t slot = begin_[part]; slot < begin_[part + 1]; ++slot) {
                const int32_t row = slot_row[slot];
                part_[row] = part;
                for (int32_t at = on_.row_begin[row]; at < on_.row_begin[row + 1]; ++at)
                    if (count(on_.row_pages[at], part)++ == 0) ++total_;
            }
        for (int32_t part = 0; part < parts_; ++part) refresh(part, slot_row);
    }

    int64_t total() const { return total_; }
    int32_t part(int32_t row) const { return part_[row]; }
    int32_t parts() const { return parts_; }
    int32_t first_slot(int32_t part) const { return begin_[part]; }
    int32_t end_slot(int32_t part) const { return begin_[part + 1]; }

    // change[q] = what the swap of `row` and q adds to the total, for every q.
    void changes(int32_t row, const std::vector<int32_t>& slot_row, std::vector<int32_t>& change) {
        const int32_t own = part_[row];
        std::fill(hits_.begin(), hits_.end(), 0);
        for (int32_t at = on_.row_begin[row]; at < on_.row_begin[row + 1]; ++at) {
            const uint8_t* counts = &count_[static_cast<size_t>(on_.row_pages[at]) * parts_];
            uint16_t* hits = hits_.data();
            for (int32_t part = 0; part < parts_; ++part)
                hits[part] = static_cast<uint16_t>(hits[part] + (counts[part] != 0));
        }
        const int32_t base = shared_[row];
        for (int32_t q = 0; q < on_.rows; ++q) change[q] = base + shared_[q] - hits_[part_[q]];
        ++stamp_now_;
        for (int32_t slot = begin_[own]; slot < begin_[own + 1]; ++slot) {
            const int32_t member = slot_row[slot];
            if (member == row) continue;
            for (int32_t at = on_.row_begin[member]; at < on_.row_begin[member + 1]; ++at) {
                const int32_t page = on_.row_pages[at];
                if (stamp_[page] == stamp_now_) continue;
                stamp_[page] = stamp_now_;
                for (int32_t i = on_.page_begin[page]; i < on_.page_begin[page + 1]; ++i)
                    --change[on_.page_rows[i]];
            }
        }
        for (int32_t at = on_.row_begin[row]; at < on_.row_begin[row + 1]; ++at) {
            const int32_t page = on_.row_pages[at];
            const uint8_t* counts = &count_[static_cast<size_t>(page) * parts_];
            for (int32_t i = on_.page_begin[page]; i < on_.page_begin[page + 1]; ++i) {
                const int32_t q = on_.page_rows[i];
                change[q] += counts[part_[q]] == 1;
            }
        }
        for (int32_t slot = begin_[own]; slot < begin_[own + 1]; ++slot) change[slot_row[slot]] = 0;
    }

    // change[q] alone, by the same sum; call mark(row) before.
    int32_t change(int32_t row, int32_t q) {
        const int32_t own = part_[row], other = part_[q];
        if (own == other) return 0;
        int32_t sum = shared_[row] + shared_[q];
        for (int32_t at = on_.row_begin[row]; at < on_.row_begin[row + 1]; ++at)
            sum -= count(on_.row_pages[at], other) != 0;
        for (int32_t at = on_.row_begin[q]; at < on_.row_begin[q + 1]; ++at) {
            const int32_t page = on_.row_pages[at];
            const int32_t both = stamp_[page] == stamp_now_;
            sum += both & (count(page, other) == 1);
            sum -= count(page, own) > both;
        }
        return sum;
    }

    void mark(int32_t row) {
        ++stamp_now_;
        for (int32_t at = on_.row_begin[row]; at < on_.row_begin[row + 1]; ++at)
            stamp_[on_.row_pages[at]] = stamp_now_;
    }

    // Call after slot_row holds the swapped rows.
    void swapped(int32_t a, int32_t b, const std::vector<int32_t>& slot_row) {
        const int32_t part_a = part_[a], part_b = part_[b];
        if (part_a == part_b) return;
        move(a, part_a, part_b);
        move(b, part_b, part_a);
        refresh(part_a, slot_row);
        refresh(part_b, slot_row);
    }

  private:
    uint8_t& count(int32_t page, int32_t part) { return count_[static_cast<size_t>(page) * parts_ + part]; }

    void move(int32_t row, int32_t from, int32_t to) {
        for (int32_t at = on_.row_begin[row]; at < on_.row_begin[row + 1]; ++at) {
            const int32_t page = on_.row_pages[at];
            if (--count(page, from) == 0) --total_;
            if (count(page, to)++ == 0) ++total_;
        }
        part_[row] = to;
    }

    void refresh(int32_t part, const std::vector<int32_t>& slot_row) {
        for (int32_t slot = begin_[part]; slot < begin_[part + 1]; ++slot) {
            const int32_t row = slot_row[slot];
            int32_t shared = 0;
            for (int32_t at = on_.row_begin[row]; at < on_.row_begin[row + 1]; ++at)
                shared += count(on_.row_pages[at], part) > 1;
            shared_[row] = shared;
        }
    }

    const Incidence& on_;
    const std::vector<int32_t> begin_;
    const int32_t parts_;
    int64_t total_ = 0;
    int64_t stamp_now_ = 0;
    std::vector<uint8_t> count_;          // [pages, parts]
    std::vector<int32_t> part_, shared_;  // [rows]
    std::vector<uint16_t> hits_;          // [parts]
    std::vector<int64_t> stamp_;          // [pages]
};

std::vector<int32_t> cut(int32_t rows, int64_t group, int64_t subgroup) {
    std::vector<int32_t> begin;
    for (int64_t first = 0; first < rows; first += group)
        for (int64_t at = first; at < std::min<int64_t>(first + group, rows); at += subgroup)
            begin.push_back(static_cast<int32_t>(at));
    begin.push_back(rows);
    return begin;
}

int64_t least(const Incidence& on, int64_t size) {
    int64_t sum = on.lone;
    for (int32_t page = 0; page < on.pages; ++page)
        sum += (on.page_begin[page + 1] - on.page_begin[page] + size - 1) / size;
    return sum;
}

}  // namespace

class WindowImprover {
  public:
    // order: [rows], row numbers that start at first_row.
    WindowImprover(const int32_t* pages, int32_t rows, int64_t topk, const int32_t* order, int64_t first_row,
                   int64_t group, int64_t subgroup, Objective objective, uint64_t seed)
        : first_row_(first_row),
          by_rounds_(objective == Objective::kRounds),
          on_(pages, rows, topk),
          slot_row_(shifted(order, rows, first_row)),
          groups_(on_, slot_row_, cut(rows, group, group)),
          subgroups_(on_, slot_row_, cut(rows, group, std::min(group, subgroup))),
          bound_{least(on_, group), least(on_, std::min(group, subgroup))},
          random_(seed) {
        row_slot_.resize(rows);
        for (int32_t slot = 0; slot < rows; ++slot) row_slot_[slot_row_[slot]] = slot;
        change_.resize(rows);
        second_change_.resize(rows);
        queued_.assign(rows, 1);
        for (int32_t row = 0; row < rows; ++row) queue_.push_back(row);
    }

    Work work() const { return {groups_.total() + on_.lone, subgroups_.total() + on_.lone}; }
    Work bound() const { return bound_; }
    int64_t rows() const { return on_.rows; }
    void order(int32_t* out) const {
        for (size_t slot = 0; slot < slot_row_.size(); ++slot)
            out[slot] = static_cast<int32_t>(first_row_ + slot_row_[slot]);
    }

    // Swaps until none helps; false when the time was up before.
    bool descend(Clock::time_point until) {
        while (!queue_.empty()) {
            if (Clock::now() >= until) return false;
            const int32_t row = queue_.front();
            queue_.pop_front();
            queued_[row] = 0;
            const int32_t other = best_partner(row);
            if (other >= 0) swap(row, other);
        }
        return true;
    }

    bool at_bound() const {
        if (groups_.parts() <= 1 && subgroups_.parts() <= 1) return true;
        const Work now = work();
        return by_rounds_ ? now.rounds <= bound_.rounds : now.visits <= bound_.visits;
    }

    // One perturbation and what follows from it; kept when at least as good, else undone.
    void restart(Clock::time_point until) {
        if (on_.page_rows.empty()) return;
        const int64_t before = value();
        journal_.clear();
        journaling_ = true;
        for (int i = 0; i < kKicks; ++i) {
            const auto edge = random_.below(static_cast<int64_t>(on_.page_rows.size()));
            const int32_t a = on_.page_rows[edge];
            const int32_t page =
                on_.row_pages[on_.row_begin[a] + random_.below(on_.row_begin[a + 1] - on_.row_begin[a])];
            const int32_t b = on_.page_rows[on_.page_begin[page] +
                                            random_.below(on_.page_begin[page + 1] - on_.page_begin[page])];
            if (subgroups_.part(a) != subgroups_.part(b)) swap(a, b);
        }
        const bool finished = descend(until);
        journaling_ = false;
        if (value() > before || (!finished && value() == before)) {
            while (!journal_.empty()) {
                exchange(journal_.back().first, journal_.back().second);
                journal_.pop_back();
            }
            finish();
        }
        // Better but not finished is kept: the next call's descend() goes on from the queue.
    }

  private:
    static constexpr int kKicks = 2;
    static constexpr int64_t kFew = 64;

    static std::vector<int32_t> shifted(const int32_t* order, int32_t rows, int64_t first_row) {
        std::vector<int32_t> local(order, order + rows);
        for (int32_t& row : local) row = static_cast<int32_t>(row - first_row);
        return local;
    }

    int64_t value() const {
        const int64_t visits = groups_.total(), rounds = subgroups_.total();
        return by_rounds_ ? (rounds << 31) + visits : (visits << 31) + rounds;
    }

    // The row whose swap lowers the value most, the lowest of equals; -1 when none lowers it.
    int32_t best_partner(int32_t row) {
        (by_rounds_ ? subgroups_ : groups_).changes(row, slot_row_, change_);
        const int32_t least = *std::min_element(change_.begin(), change_.end());
        // The second count matters among equals alone, and these are few.
        Level& second = by_rounds_ ? groups_ : subgroups_;
        const auto equals = std::count(change_.begin(), change_.end(), least);
        const bool all = equals > kFew;
        if (all)
            second.changes(row, slot_row_, second_change_);
        else
            second.mark(row);
        int32_t best = -1, best_second = least < 0 ? std::numeric_limits<int32_t>::max() : 0;
        for (size_t q = 0; q < change_.size(); ++q) {
            if (change_[q] != least) continue;
            const auto other = static_cast<int32_t>(q);
            const int32_t change = all ? second_change_[q] : second.change(row, other);
            if (change < best_second) {
                best_second = change;
                best = other;
            }
        }
        return best;
    }

    void exchange(int32_t a, int32_t b) {
        std::swap(slot_row_[row_slot_[a]], slot_row_[row_slot_[b]]);
        std::swap(row_slot_[a], row_slot_[b]);
        groups_.swapped(a, b, slot_row_);
        subgroups_.swapped(a, b, slot_row_);
    }

    void swap(int32_t a, int32_t b) {
        exchange(a, b);
        if (journaling_) journal_.emplace_back(a, b);
        for (const int32_t row : {a, b}) {
            const int32_t part = groups_.part(row);
            for (int32_t slot = groups_.first_slot(part); slot < groups_.end_slot(part); ++slot) {
                const int32_t member = slot_row_[slot];
                if (queued_[member]) continue;
                queued_[member] = 1;
                queue_.push_back(member);
            }
        }
    }

    void finish() {
        for (const int32_t row : queue_) queued_[row] = 0;
        queue_.clear();
    }

    const int64_t first_row_;
    const bool by_rounds_;
    const Incidence on_;
    std::vector<int32_t> slot_row_, row_slot_;
    Level groups_, subgroups_;
    const Work bound_;
    Random random_;
    std::vector<int32_t> change_, second_change_;  // [rows]
    std::deque<int32_t> queue_;
    std::vector<uint8_t> queued_;  // [rows]
    bool journaling_ = false;
    std::vector<std::pair<int32_t, int32_t>> journal_;
};

Improver::Improver(const int32_t* pages, int64_t rows, int64_t topk, const int32_t* order, int64_t window,
                   int64_t group, int64_t subgroup, Objective objective, uint64_t seed, int threads)
    : rows_(rows), threads_(threads) {
    if (threads_ == 0) threads_ = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (int64_t begin = 0; begin < rows; begin += window) {
        const auto count = static_cast<int32_t>(std::min(window, rows - begin));
        windows_.push_back(std::make_unique<WindowImprover>(
            pages + begin * topk, count, topk, order + begin, begin, group, subgroup, objective,
            seed * 0xD1B54A32D192ED03ull + static_cast<uint64_t>(windows_.size())));
        if (window >= rows) break;  // begin + window may not fit
    }
}

Improver::~Improver() = default;

bool Improver::run(double seconds, bool restarts) {
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                          std::chrono::duration<double>(std::min(seconds, 1e6)));
    const auto count = static_cast<int64_t>(windows_.size());
    const auto threads = std::min<int64_t>(threads_, count);
    std::exception_ptr failure;
    std::mutex failure_mutex;
    std::vector<uint8_t> done(windows_.size(), 0);
    // Thread t owns windows t, t + threads, ...
    const auto work = [&](int64_t first) {
        try {
            bool in_time = true;
            for (int64_t w = first; w < count; w += threads) {
                const bool finished = windows_[w]->descend(until);
                in_time = in_time && finished;
                done[w] = finished && (!restarts || windows_[w]->at_bound());
            }
            bool open = restarts && in_time;
            while (open) {
                open = false;
                for (int64_t w = first; w < count && Clock::now() < until; w += threads) {
                    if (windows_[w]->at_bound()) {
                        done[w] = 1;
                        continue;
                    }
                    open = true;
                    // Some in a row, while the window's tables are in cache.
                    for (int i = 0; i < 32 && Clock::now() < until; ++i) windows_[w]->restart(until);
                }
            }
        } catch (...) {
            const std::lock_guard<std::mutex> lock(failure_mutex);
            failure = std::current_exception();
        }
    };
    std::vector<std::thread> helpers;
    std::vector<int64_t> left_over;
    for (int64_t t = 1; t < threads; ++t) {
        try {
            helpers.emplace_back(work, t);
        } catch (const std::system_error&) {
            left_over.push_back(t);  // no more threads to be had: this one takes those windows as well
        }
    }
    work(0);
    for (const int64_t t : left_over) work(t);
    for (std::thread& helper : helpers) helper.join();
    if (failure) std::rethrow_exception(failure);
    return std::all_of(done.begin(), done.end(), [](uint8_t x) { return x != 0; });
}

void Improver::order(int32_t* out) const {
    for (const auto& window : windows_) {
        window->order(out);
        out += window->rows();
    }
}

Work Improver::work() const {
    Work sum;
    for (const auto& window : windows_) {
        const Work part = window->work();
        sum.visits += part.visits;
        sum.rounds += part.rounds;
    }
    return sum;
}

Work Improver::bound() const {
    Work sum;
    for (const auto& window : windows_) {
        const Work part = window->bound();
        sum.visits += part.visits;
        sum.rounds += part.rounds;
    }
    return sum;
}

}  // namespace pageweaver::search
