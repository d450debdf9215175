// Python bindings of the C++ module, pageweaver._native: argument checks, then the call without the GIL.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "search/greedy.hpp"
#include "search/improve.hpp"

namespace py = pybind11;

namespace {

using namespace pageweaver;

void require_at_least(const char* name, int64_t value, int64_t low) {
    if (value < low)
        throw py::value_error(std::string(name) + " = " + std::to_string(value) +
                              "; supported: integers >= " + std::to_string(low));
}

search::Objective parse_objective(const std::string& objective) {
    if (objective == "visits") return search::Objective::kVisits;
    if (objective == "rounds") return search::Objective::kRounds;
    throw py::value_error("objective = '" + objective + "'; supported: 'visits', 'rounds'");
}

// Copies only what is not contiguous already.
py::array_t<int32_t, py::array::c_style> packed_pages(const py::array& pages) {
    if (!pages.dtype().is(py::dtype::of<int32_t>()))
        throw py::value_error("pages has dtype " + py::str(pages.dtype()).cast<std::string>() +
                              "; supported: int32");
    if (pages.ndim() != 2)
        throw py::value_error("pages has " + std::to_string(pages.ndim()) +
                              " dimensions; supported: 2, [rows, topk]");
    if (pages.size() > std::numeric_limits<int32_t>::max())
        throw py::value_error("pages has " + std::to_string(pages.size()) +
                              " entries; supported: up to 2^31 - 1");
    if (pages.shape(1) > search::kMaxTopk)
        throw py::value_error("pages has topk = " + std::to_string(pages.shape(1)) + "; supported: 0 to " +
                              std::to_string(search::kMaxTopk));
    return py::array_t<int32_t, py::array::c_style>::ensure(pages);
}

py::array_t<int32_t> greedy_order(const py::array& pages, int64_t window, int64_t group, int64_t subgroup,
                                  const std::string& objective, int threads) {
    const auto packed = packed_pages(pages);
    const int64_t rows = packed.shape(0), topk = packed.shape(1);
    require_at_least("window", window, 1);
    require_at_least("group", group, 1);
    require_at_least("subgroup", subgroup, 1);
    require_at_least("threads", threads, 0);
    const search::Objective parsed = parse_objective(objective);

    py::array_t<int32_t> order(rows);
    const int32_t* source = packed.data();
    int32_t* target = order.mutable_data();
    {
        py::gil_scoped_release release;
        search::greedy_order(source, rows, topk, window, group, subgroup, parsed, threads, target);
    }
    return order;
}

std::unique_ptr<search::Improver> make_improver(const py::array& pages, const py::array& order,
                                                int64_t window, int64_t group, int64_t subgroup,
                                                const std::string& objective, uint64_t seed, int threads) {
    const auto packed = packed_pages(pages);
    const int64_t rows = packed.shape(0), topk = packed.shape(1);
    require_at_least("window", window, 1);
    require_at_least("group", group, 1);
    require_at_least("subgroup", subgroup, 1);
    require_at_least("threads", threads, 0);
    if (group > search::kMaxGroup)
        throw py::value_error("group = " + std::to_string(group) + "; supported: 1 to " +
                              std::to_string(search::kMaxGroup));
    const search::Objective parsed = parse_objective(objective);
    if (!order.dtype().is(py::dtype::of<int32_t>()) || order.ndim() != 1 || order.shape(0) != rows)
        throw py::value_error("order: supported: int32 [" + std::to_string(rows) +
                              "], one entry a row of pages");
    const auto packed_order = py::array_t<int32_t, py::array::c_style>::ensure(order);
    const int32_t* slots = packed_order.data();
    std::vector<bool> seen(rows, false);
    for (int64_t slot = 0; slot < rows; ++slot) {
        const int64_t row = slots[slot];
        if (row < 0 || row >= rows || row / window != slot / window || seen[row])
            throw py::value_error("order has row " + std::to_string(row) + " at slot " +
                                  std::to_string(slot) + "; supported: every row of a window of " +
                                  std::to_string(window) + " once, inside that window");
        seen[row] = true;
    }
    py::gil_scoped_release release;
    return std::make_unique<search::Improver>(packed.data(), rows, topk, slots, window, group, subgroup,
                                              parsed, seed, threads);
}

py::tuple pair(const search::Work& work) {
    return py::make_tuple(work.visits, work.rounds);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "PageWeaver's C++ half: CPU search and host twins of device code.";
    module.def(
        "greedy_order", &greedy_order, py::arg("pages"), py::arg("window"), py::arg("group"),
        py::arg("subgroup") = 4, py::arg("objective") = "visits", py::arg("threads") = 0,
        "Bounded greedy grouping (Eq. 6): int32 pages [rows, topk] -> int32 order [rows], slot to row.");
    py::class_<search::Improver>(module, "Improver",
                                 "Improving search: swaps inside windows, from a given order.")
        .def(py::init(&make_improver), py::arg("pages"), py::arg("order"), py::arg("window"),
             py::arg("group"), py::arg("subgroup") = 4, py::arg("objective") = "visits", py::arg("seed") = 0,
             py::arg("threads") = 0)
        .def("run", &search::Improver::run, py::arg("seconds"), py::arg("restarts"),
             py::call_guard<py::gil_scoped_release>(),
             "Work for about that long; returns whether nothing is left to do.")
        .def("order",
             [](const search::Improver& self) {
                 py::array_t<int32_t> order(self.rows());
                 self.order(order.mutable_data());
                 return order;
             })
        .def("work", [](const search::Improver& self) { return pair(self.work()); })
        .def("bound", [](const search::Improver& self) { return pair(self.bound()); });
}
