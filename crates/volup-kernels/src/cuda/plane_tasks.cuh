// What `plane_gradient` reads: in which order, and copies of it to shared memory before it is asked for.

#pragma once

#include "copy_async.cuh"
#include "divisor.cuh"
#include "element.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
/// Channels of 16 bytes in the ring, and positions of which a thread has as many channels at once, those of a warp together.
constexpr int VECTOR = 8, OWN = sizeof(Element) == 2 ? 2 : 1, CHUNK = 32 * OWN;
/// Voxels of a step of the products, and elements after those of a channel, for the banks.
constexpr int STEP = 16, APART = 8;
/// What a warp has copied of a tensor for a task: of each channel 16 bytes more than its positions take, as they start anywhere in 16, or of each
/// position its channels; and for how many tasks.
constexpr int SIZE = sizeof(Element), PER = 16 / SIZE, RUN = CHUNK / PER + 1, OF_TENSOR = VECTOR * RUN * 16, SLOTS = 2;
static_assert(VECTOR * 4 == 32 && OF_TENSOR >= CHUNK * VECTOR * SIZE, "four lanes a channel; positions take less");

/// One axis: sizes of x and y, and taps.
struct Axis {
    int input, output, kernel, stride, padding, dilation;

    __device__ __forceinline__ int reach() const { return (kernel - 1) * dilation + 1; }
    /// Whether a tap reads an output's voxel for one of the input's.
    __device__ __forceinline__ bool reads(int i, int t) const { return (unsigned)(i * stride - padding + t * dilation) < (unsigned)output; }
};

/// What follows from the arguments; in shared memory, for the registers.
struct Sizes {
    /// Of `dy` what taps of an item's voxels read: columns, lines and planes.
    int columns, rows, slots;
    /// Bytes in the ring from a residue of a line, a line and a plane to the next.
    int of_residue, of_line, of_plane;
    /// Steps of an item's plane, and units of VECTOR channels.
    int steps, units;
    /// Of a sample: segments of planes, and of these tiles of lines.
    int segments, tiles;
    Divisor by_output, by_stride, by_input, by_voxels, by_units, by_slots, by_tiles, by_segments;
};

/// An item: lines from `h0` on of planes of a sample.
struct Item {
    int n, h0, first, last;
};

/// A task: so many chunks of positions and units of channels, units first, of a plane `od` of `dy` that is new for a plane `id` of an item.
/// Planes from `end` on are new later. Of the item: how many tasks a plane has, and where the first line that is there lies in a sample.
struct Task {
    int item, id, od, end, at, count, start;
    const Element *dz, *y;
};

/// Puts an element to shared memory.
__device__ __forceinline__ void put_shared(unsigned to, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory"); }
template <typename T> __device__ __forceinline__ void put_shared(unsigned to, T x) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x.bits) : "memory"); }

/// The tasks of a block: those of all planes and items are numbered through, and each warp has every so-manieth.
struct Tasks {
    const Sizes &size;
    const Axis &d, &h;
    int lines, planes, items, width, out_channels;
    /// The tensors, and where the first of them ends.
    const Element *dz, *y, *past;
    long long y_n;
    int y_c, y_d, y_h, y_w;

    __device__ __forceinline__ Item item(int item) const {
        const int rest = size.by_tiles.divide(item), n = size.by_segments.divide(rest), first = (rest - n * size.segments) * planes;
        return {n, (item - rest * size.tiles) * lines, first, min(first + planes, d.input)};
    }
    /// The first line that taps of an item's lines read and that is there, and how many there are.
    __device__ __forceinline__ int first_line(int h0) const { return max(h0 * h.stride - h.padding, 0); }
    __device__ __forceinline__ int lines_there(int h0) const { return max(min(h0 * h.stride - h.padding + size.rows, h.output) - first_line(h0), 0); }
    /// What is new for a plane of the input, if planes up to `next` are there.
    __device__ __forceinline__ int begin_of(int id, int next) const { return max(max(id * d.stride - d.padding, next), 0); }
    __device__ __forceinline__ int end_of(int id) const { return min(id * d.stride - d.padding + size.slots, d.output); }

    /// The first plane of a task's item.
    __device__ __forceinline__ void begin(Task &task) const {
        const Item of = item(task.item);
        task.id = of.first;
        task.od = begin_of(of.first, 0);
        task.end = max(end_of(of.first), task.od);
        task.count = (lines_there(of.h0) * width + CHUNK - 1) / CHUNK * size.units;
        task.start = first_line(of.h0) * y_h;
        task.dz = dz + of.n * y_n;
        task.y = y + of.n * y_n;
    }
    /// Goes on to a task that there is, or past the last item.
    __device__ __forceinline__ void settle(Task &task) const {
        while (task.at >= task.count || task.od >= task.end) {
            if (task.od < task.end) {
                task.at -= task.count;
                if (++task.od < task.end) continue;
            }
            if (++task.id < item(task.item).last) {
                task.od = begin_of(task.id, task.end);
                task.end = max(end_of(task.id), task.od);
            } else if ((task.item += gridDim.x) < items) {
                begin(task);
            } else {
                return;
            }
        }
    }

    /// Asks for what a task is made of; a group of copies, also where there is none.
    __device__ __forceinline__ void fetch(const Task &task, unsigned to) const {
        if (task.item < items) {
            const int lane = threadIdx.x % 32, chunk = size.by_units.divide(task.at), c0 = (task.at - chunk * size.units) * VECTOR;
            const int start = task.od * y_d + task.start + chunk * CHUNK * y_w;
            if (y_w == 1) {
                // Four lanes a channel; past the last one the last one again.
                const int from = start + min(c0 + lane / 4, out_channels - 1) * y_c;
                const int shift = (int)((size_t)(task.dz + from) / SIZE) & PER - 1;
                to += lane / 4 * (RUN * 16) + lane % 4 * 16;
                const Element *const first = task.dz + (from - shift) + lane % 4 * PER;
                const auto copy_run = [&](unsigned to, const Element *first) {
#pragma unroll
                    for (int piece = 0; piece < RUN; piece += 4)
                        if (piece + 4 <= RUN || lane % 4 < RUN - piece) copy_async<16>(to + piece * 16, first + piece * PER, true);
                };
                // Where a channel ends something may lie past the end of all.
                if (start + CHUNK + 2 * PER <= y_c) {
                    copy_run(to, first);
                    if (y) copy_run(to + OF_TENSOR, first - task.dz + task.y);
                } else {
                    // Single elements of those that are there.
                    const long long left = past - first;
#pragma unroll 1
                    for (int piece = 0; piece < RUN - lane % 4; piece += 4)
#pragma unroll 1
                        for (int e = 0; e < PER && piece * PER + e < left; e++) {
                            const int at = piece * PER + e;
                            put_shared(to + piece * 16 + e * SIZE, first[at]);
                            if (y) put_shared(to + OF_TENSOR + piece * 16 + e * SIZE, (first - task.dz + task.y)[at]);
                        }
                }
            } else if (out_channels % VECTOR) {
                // Channels that are no whole vectors one by one; past the last one the last one again.
#pragma unroll 1
                for (int i = lane; i < CHUNK * VECTOR; i += 32) {
                    const int position = i / VECTOR, e = i % VECTOR, from = start + position * y_w + min(c0 + e, out_channels - 1);
                    const unsigned at = to + (e / PER * CHUNK + position) * 16 + e % PER * SIZE;
                    if (task.dz + from >= past) continue;
                    put_shared(at, task.dz[from]);
                    if (y) put_shared(at + OF_TENSOR, task.y[from]);
                }
            } else {
#pragma unroll
                for (int k = 0; k < OWN; k++) {
                    const int position = 32 * k + lane, from = start + c0 + position * y_w;
                    const bool is = task.dz + from < past;
#pragma unroll
                    for (int piece = 0; piece < VECTOR / PER; piece++) {
                        const unsigned at = to + (piece * CHUNK + position) * 16;
                        copy_async<16>(at, is ? task.dz + from + piece * PER : dz, is);
                        if (y) copy_async<16>(at + OF_TENSOR, is ? task.y + from + piece * PER : dz, is);
                    }
                }
            }
        }
        end_copies();
    }
};
