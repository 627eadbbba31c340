// How the rows of `gradient_rows` lie in memory.

#pragma once

#if KIND == 5 || KIND == 2
#include "row_exponent.cuh"
#else
#include "element.cuh"
#endif

#include <type_traits>

/// What rows are of, and how many of these are 16 bytes.
using Row = std::conditional_t<KIND == 5, Half, Element>;
constexpr int ROW_VECTOR = 16 / sizeof(Row);

/// Elements from a row to the next, and from 16 bytes of a row to its next: a row after the other, or panels, in which the same
/// 16 bytes of neighbouring rows lie side by side.
struct RowLayout {
    long long row, panel;

    /// Where a slot of the first row lies, counted through all groups.
    template <int VECTOR = ROW_VECTOR> __device__ __forceinline__ long long slot(int slot) const { return slot / VECTOR * panel + slot % VECTOR; }
};
