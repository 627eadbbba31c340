// How the rows of `gradient_rows` lie in memory.

#pragma once

#include "element.cuh"

/// Elements of 16 bytes.
constexpr int ROW_VECTOR = 16 / sizeof(Element);

/// Elements from a row to the next, and from 16 bytes of a row to its next: a row after the other, or panels, in which the same
/// 16 bytes of neighbouring rows lie side by side.
struct RowLayout {
    long long row, panel;

    /// Where a slot of the first row lies, counted through all groups.
    __device__ __forceinline__ long long slot(int slot) const { return slot / ROW_VECTOR * panel + slot % ROW_VECTOR; }
};
