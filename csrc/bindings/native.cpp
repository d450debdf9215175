// Python bindings of the C++ module, pageweaver._native: argument checks, then the call without the GIL.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>

#include "search/greedy.hpp"

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

py::array_t<int32_t> greedy_order(const py::array& pages, int64_t window, int64_t group, int64_t subgroup,
                                  const std::string& objective, int threads) {
    if (!pages.dtype().is(py::dtype::of<int32_t>()))
        throw py::value_error("pages has dtype " + py::str(pages.dtype()).cast<std::string>() +
                              "; supported: int32");
    if (pages.ndim() != 2)
        throw py::value_error("pages has " + std::to_string(pages.ndim()) +
                              " dimensions; supported: 2, [rows, topk]");
    const int64_t rows = pages.shape(0), topk = pages.shape(1);
    if (pages.size() > std::numeric_limits<int32_t>::max())
        throw py::value_error("pages has " + std::to_string(pages.size()) +
                              " entries; supported: up to 2^31 - 1");
    if (topk > search::kMaxTopk)
        throw py::value_error("pages has topk = " + std::to_string(topk) + "; supported: 0 to " +
                              std::to_string(search::kMaxTopk));
    require_at_least("window", window, 1);
    require_at_least("group", group, 1);
    require_at_least("subgroup", subgroup, 1);
    require_at_least("threads", threads, 0);
    const search::Objective parsed = parse_objective(objective);

    // Copies only what is not contiguous already.
    const auto packed = py::array_t<int32_t, py::array::c_style>::ensure(pages);
    py::array_t<int32_t> order(rows);
    const int32_t* source = packed.data();
    int32_t* target = order.mutable_data();
    {
        py::gil_scoped_release release;
        search::greedy_order(source, rows, topk, window, group, subgroup, parsed, threads, target);
    }
    return order;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "PageWeaver's C++ half: CPU search and host twins of device code.";
    module.def(
        "greedy_order", &greedy_order, py::arg("pages"), py::arg("window"), py::arg("group"),
        py::arg("subgroup") = 4, py::arg("objective") = "visits", py::arg("threads") = 0,
        "Bounded greedy grouping (Eq. 6): int32 pages [rows, topk] -> int32 order [rows], slot to row.");
}
