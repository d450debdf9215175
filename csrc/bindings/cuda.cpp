// Python bindings of the Hopper kernels, pageweaver._cuda: raw addresses, sizes, strides and a stream. Python
// has validated everything; what fails here is a launch, and it is named.

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "page_union/page_union.hpp"
#include "prepare/prepare.hpp"
#include "union_attention/union_attention.hpp"

namespace py = pybind11;

namespace {

using namespace pageweaver;

void check(cudaError_t error, const char* kernel) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // a failed launch must not surface in a later call
    throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorName(error) + " (" +
                             cudaGetErrorString(error) + ")");
}

template <typename T>
void read(T& field, const py::dict& arguments, const char* name) {
    if (!arguments.contains(name)) throw py::key_error(std::string("missing argument ") + name);
    const py::object value = arguments[name];
    if constexpr (std::is_pointer_v<T>)
        field = reinterpret_cast<T>(value.cast<uintptr_t>());
    else
        field = value.cast<T>();
}

#define READ(name) read(params.name, arguments, #name)

void prepare_unions(const py::dict& arguments, uintptr_t stream) {
    PrepareParams params{};
    READ(q2k_indices), READ(q2k_stride_head), READ(q2k_stride_row), READ(q2k_stride_column);
    READ(cu_seqlens_q), READ(seqused_k), READ(page_table), READ(page_table_stride);
    READ(v_cache), READ(v_stride_page), READ(v_stride_token), READ(v_stride_head);
    READ(query_ids), READ(total_q), READ(num_kv_heads), READ(topk), READ(batch_size), READ(max_pages);
    READ(queries_per_tile), READ(tiles_per_group), READ(max_groups), READ(max_union), READ(mask_words);
    READ(max_packed), READ(group_offsets), READ(group_requests), READ(union_pages), READ(union_masks);
    READ(union_counts), READ(tile_counts), READ(unit_order), READ(packed_slots);
    READ(page_marks), READ(packed_v), READ(group_starts), READ(counters), READ(written_ids);
    READ(window), READ(max_windows), READ(by_rounds), READ(window_choices), READ(sought_below),
        READ(window_starts);
    check(launch_prepare(params, reinterpret_cast<cudaStream_t>(stream)), "prepare_unions");
}

UnionParams read_union(const py::dict& arguments) {
    UnionParams params{};
    READ(q), READ(q_stride_row), READ(q_stride_head), READ(out), READ(out_stride_row), READ(out_stride_head);
    READ(lse), READ(lse_stride_row), READ(lse_stride_head), READ(cu_seqlens_q), READ(seqused_k);
    READ(page_table), READ(page_table_stride), READ(query_ids), READ(group_offsets), READ(group_requests);
    READ(union_pages), READ(union_masks), READ(union_counts), READ(tile_counts), READ(unit_order);
    READ(counters), READ(packed_slots), READ(packed_v), READ(softmax_scale_pointer), READ(k_scale_pointer);
    READ(v_scale_pointer), READ(softmax_scale), READ(k_scale), READ(v_scale), READ(total_q);
    READ(num_kv_heads), READ(num_qo_heads), READ(group_shift), READ(batch_size), READ(max_pages);
    READ(queries_per_tile), READ(tiles_per_group), READ(max_groups), READ(max_union), READ(mask_words);
    return params;
}

PageListParams read_page_lists(const py::dict& arguments) {
    PageListParams params{};
    READ(q2k_indices), READ(q2k_stride_head), READ(q2k_stride_row), READ(q2k_stride_column);
    READ(cu_seqlens_q), READ(seqused_k), READ(total_q), READ(num_kv_heads), READ(topk), READ(batch_size);
    READ(max_pages), READ(queries_per_tile), READ(max_units), READ(max_packed), READ(paired_limit);
    READ(round_pages), READ(rounds);
    READ(unit_pages), READ(unit_offsets), READ(unit_requests), READ(unit_counts), READ(unit_queries);
    READ(unit_slots), READ(partial_counts), READ(packed_slots), READ(member_bits);
    READ(head_words), READ(page_counts), READ(paired_pages), READ(paired_counts), READ(overlaps);
    READ(partners), READ(list_prefixes), READ(head_blocks), READ(list_sizes), READ(list_starts);
    READ(class_totals), READ(chunks), READ(chunk_pages), READ(overlap_stride), READ(counters);
    return params;
}

// Without groups: nothing but V is packed.
PrepareParams read_page_values(const py::dict& arguments) {
    PrepareParams params{};
    READ(cu_seqlens_q), READ(seqused_k), READ(page_table), READ(page_table_stride), READ(v_cache);
    READ(v_stride_page), READ(v_stride_token), READ(v_stride_head), READ(num_kv_heads), READ(batch_size);
    READ(max_pages), READ(max_packed), READ(packed_slots), READ(packed_v), READ(counters);
    return params;
}

void prepare_page_union(const py::dict& arguments, uintptr_t stream_address) {
    const auto stream = reinterpret_cast<cudaStream_t>(stream_address);
    const PageListParams lists = read_page_lists(arguments);
    check(launch_page_lists(lists, stream), "prepare_page_union (lists)");
    if (lists.rounds > 1) return;  // V is packed before each
    const PageRange all{0, int64_t{lists.batch_size} * lists.max_pages};
    check(launch_pack_values(read_page_values(arguments), 0, all, stream), "prepare_page_union (packed V)");
}

PageUnionParams read_page_union(const py::dict& arguments) {
    PageUnionParams params{};
    READ(q), READ(q_stride_row), READ(q_stride_head), READ(out), READ(out_stride_row), READ(out_stride_head);
    READ(lse), READ(lse_stride_row), READ(lse_stride_head), READ(cu_seqlens_q), READ(seqused_k);
    READ(page_table), READ(page_table_stride), READ(unit_pages), READ(unit_offsets), READ(unit_requests);
    READ(unit_counts), READ(unit_queries), READ(unit_slots), READ(partial_counts), READ(packed_slots);
    READ(packed_v), READ(packed_q), READ(partials), READ(lse_partials);
    READ(unit_tickets), READ(softmax_scale_pointer), READ(k_scale_pointer), READ(v_scale_pointer);
    READ(softmax_scale), READ(k_scale), READ(v_scale), READ(total_q), READ(topk), READ(num_kv_heads);
    READ(num_qo_heads), READ(batch_size), READ(max_pages), READ(max_units), READ(group_shift);
    READ(has_pairs), READ(is_split), READ(rounds), READ(round_pages), READ(pair_slots);
    return params;
}

#undef READ

// A cache as it lies in memory, strides in bytes.
struct Cache {
    const void* data;
    int64_t num_pages, stride_page, stride_token, stride_head;

    Cache(const py::dict& arguments, const std::string& name, int element_bytes) {
        read(data, arguments, (name + "_cache").c_str());
        read(num_pages, arguments, "num_pages");
        read(stride_page, arguments, (name + "_stride_page").c_str());
        read(stride_token, arguments, (name + "_stride_token").c_str());
        read(stride_head, arguments, (name + "_stride_head").c_str());
        for (int64_t* stride : {&stride_page, &stride_token, &stride_head}) *stride *= element_bytes;
    }
};

void union_attention(const py::dict& arguments, uintptr_t stream) {
    const UnionParams params = read_union(arguments);
    const Cache keys(arguments, "k", 1);
    int32_t mapping_code = 0;
    read(mapping_code, arguments, "mapping");
    const Mapping mapping = static_cast<Mapping>(mapping_code);
    const int box_tokens = mapping == Mapping::kCluster ? kPageSize / 2 : kPageSize;
    CUtensorMap key_map;
    check(make_key_map(&key_map, keys.data, keys.num_pages, params.num_kv_heads, keys.stride_page,
                       keys.stride_token, keys.stride_head, box_tokens),
          "union_attention (tensor map of k_cache)");
    int32_t arithmetic_code = 0;
    read(arithmetic_code, arguments, "arithmetic");
    const Arithmetic arithmetic = static_cast<Arithmetic>(arithmetic_code);
    check(
        launch_union_attention(params, key_map, mapping, arithmetic, reinterpret_cast<cudaStream_t>(stream)),
        "union_attention");
}

void bf16_attention(const py::dict& arguments, uintptr_t stream) {
    const UnionParams params = read_union(arguments);
    const Cache keys(arguments, "k", 2), values(arguments, "v", 2);
    CUtensorMap key_map, value_map;
    check(make_bf16_map(&key_map, keys.data, keys.num_pages, params.num_kv_heads, keys.stride_page,
                        keys.stride_token, keys.stride_head, kPageSize, 1),
          "bf16_attention (tensor map of k_cache)");
    check(make_bf16_map(&value_map, values.data, values.num_pages, params.num_kv_heads, values.stride_page,
                        values.stride_token, values.stride_head, kPageSize / 2, 2),
          "bf16_attention (tensor map of v_cache)");
    check(launch_bf16_attention(params, key_map, value_map, reinterpret_cast<cudaStream_t>(stream)),
          "bf16_attention");
}

void page_partials(const py::dict& arguments, uintptr_t stream) {
    const PageUnionParams params = read_page_union(arguments);
    const Cache keys(arguments, "k", 1);
    CUtensorMap key_map;
    check(make_key_map(&key_map, keys.data, keys.num_pages, params.num_kv_heads, keys.stride_page,
                       keys.stride_token, keys.stride_head, kPageSize),
          "page_union (tensor map of k_cache)");
    check(launch_page_partials(params, key_map, read_page_values(arguments),
                               reinterpret_cast<cudaStream_t>(stream)),
          "page_union (partials)");
}

void combine_partials(const py::dict& arguments, uintptr_t stream) {
    check(launch_combine_partials(read_page_union(arguments), reinterpret_cast<cudaStream_t>(stream)),
          "page_union (combine)");
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
    module.doc() = "PageWeaver's Hopper kernels (sm_90a).";
    module.def("prepare_unions", &prepare_unions, py::arg("arguments"), py::arg("stream"),
               "Order, groups, union lists, masks, order of units and packed V^T of one call.");
    module.def("union_attention", &union_attention, py::arg("arguments"), py::arg("stream"),
               "FP8 attention over a union schedule.");
    module.def("bf16_attention", &bf16_attention, py::arg("arguments"), py::arg("stream"),
               "BF16 attention over a union schedule.");
    module.def("prepare_page_union", &prepare_page_union, py::arg("arguments"), py::arg("stream"),
               "Pairs of pages, work lists and packed V^T of one call.");
    module.def("page_partials", &page_partials, py::arg("arguments"), py::arg("stream"),
               "Quantised Q, and a partial output and LSE of every member of every unit.");
    module.def("combine_partials", &combine_partials, py::arg("arguments"), py::arg("stream"),
               "Outputs and LSE from partials.");
}
