// Where the bits of a page's queries lie.
//
// A page of a request has one bit for each query of the request, in words of 32 queries aligned to the packed
// rows: word w holds rows 32 w to 32 w + 31. The words of a page follow one another, so do the pages of a
// request. A request of rows [first, end) touches at most end / 32 - first / 32 + 1 words, hence its pages
// begin at max_pages * (first / 32 + request) and no two requests overlap: no scan over lengths is needed.
// Blocks of 256 queries follow the same rule.
#pragma once

#include <cstdint>

#include "page_union/page_union.hpp"
#include "prepare/device.cuh"

namespace pageweaver {

constexpr int kBlockWords = 8;  // words a block of 256 queries

struct RequestBits {
    int first_word, words, blocks;
    int64_t word_base, block_base;  // of the request's first page, inside a head
};

// Boundaries that pass total_q are refused in debug mode; here they must not lead out of the buffers.
__device__ __forceinline__ RequestBits request_bits(const PageListParams& p, int request) {
    const int first = min(max(p.cu_seqlens_q[request], 0), p.total_q);
    const int end = min(max(p.cu_seqlens_q[request + 1], first), p.total_q);
    RequestBits bits;
    bits.first_word = first / 32;
    bits.words = end / 32 - first / 32 + 1;
    bits.blocks = end / 256 - first / 256 + 1;
    bits.word_base = int64_t{p.max_pages} * (first / 32 + request);
    bits.block_base = int64_t{p.max_pages} * (first / 256 + request);
    return bits;
}

// The request of a row, -1 past the last one.
__device__ __forceinline__ int request_of(const PageListParams& p, int row) {
    int request = -1;
    for (int low = 0, high = p.batch_size - 1; low <= high;) {
        const int middle = (low + high) / 2;
        if (p.cu_seqlens_q[middle] <= row) {
            request = middle;
            low = middle + 1;
        } else {
            high = middle - 1;
        }
    }
    return request >= 0 && row < p.cu_seqlens_q[request + 1] ? request : -1;
}

__device__ __forceinline__ const uint32_t* page_words(const PageListParams& p, int head,
                                                      const RequestBits& bits, int page) {
    return p.member_bits + head * p.head_words + bits.word_base + int64_t{page} * bits.words;
}

// The page that a query of `request` selected in a column, -1 where it is none or starts after the query.
__device__ __forceinline__ int selected_page(const PageListParams& p, int head, int request, int query,
                                             int column) {
    const int page =
        p.q2k_indices[head * p.q2k_stride_head + query * p.q2k_stride_row + column * p.q2k_stride_column];
    const int64_t position = int64_t{query} + p.seqused_k[request] - p.cu_seqlens_q[request + 1];
    return page >= 0 && page < p.max_pages && int64_t{page} * kPageSize <= position ? page : -1;
}

// A list's members of one word: `own` and `mate` are the words of the page and of its partner.
__device__ __forceinline__ uint32_t list_word(uint32_t own, uint32_t mate, bool is_common) {
    return is_common ? own & mate : own & ~mate;
}

}  // namespace pageweaver
