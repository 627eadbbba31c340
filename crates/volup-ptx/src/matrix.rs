//! The matrix instructions: a warp's share of them.
//!
//! Sums of a step are made in double precision and cut off at 24 bits, as the GPU does after it has cut off more.

use crate::LANES;
use crate::instruction::Type;
use half::{bf16, f16};

/// An element of a matrix, of so many bits as the type has, or the half of a word.
pub(crate) fn element(of: Type, bits: u32) -> f64 {
    match of {
        Type::F16 => f64::from(f16::from_bits(bits as u16)),
        Type::BF16 => f64::from(bf16::from_bits(bits as u16)),
        _ => f64::from(f32::from_bits(bits & 0xffff_e000)),
    }
}

/// The columns of K that an instruction of 32 bytes adds up.
pub(crate) fn depth(of: Type) -> usize {
    if of == Type::TF32 { 8 } else { 16 }
}

/// What lanes hold of 16 rows of A, in four registers each.
pub(crate) fn rows_of_registers(of: Type, registers: &[[u64; LANES]]) -> Vec<[f64; 16]> {
    let mut rows = vec![[0.0; 16]; 16];
    for (index, words) in registers.iter().enumerate() {
        for (lane, &word) in words.iter().enumerate() {
            let row = lane / 4 + index % 2 * 8;
            if of == Type::TF32 {
                rows[row][lane % 4 + index / 2 * 4] = element(of, word as u32);
            } else {
                let column = lane % 4 * 2 + index / 2 * 8;
                rows[row][column] = element(of, word as u32 & 0xffff);
                rows[row][column + 1] = element(of, (word >> 16) as u32);
            }
        }
    }
    rows
}

/// What lanes hold of 8 columns of B, in two registers each: a column's K.
pub(crate) fn columns_of_registers(of: Type, registers: &[[u64; LANES]]) -> Vec<[f64; 16]> {
    let mut columns = vec![[0.0; 16]; 8];
    for (index, words) in registers.iter().enumerate() {
        for (lane, &word) in words.iter().enumerate() {
            let column = &mut columns[lane / 4];
            if of == Type::TF32 {
                column[lane % 4 + index * 4] = element(of, word as u32);
            } else {
                let k = lane % 4 * 2 + index * 8;
                column[k] = element(of, word as u32 & 0xffff);
                column[k + 1] = element(of, (word >> 16) as u32);
            }
        }
    }
    columns
}

/// A sum as the accumulators hold it: what does not fit is cut off.
pub(crate) fn cut_off(sum: f64) -> f32 {
    let near = sum as f32;
    let too_large = near.is_finite() && f64::from(near).abs() > sum.abs();
    if too_large { f32::from_bits(near.to_bits() - 1) } else { near }
}

/// Adds to the sums of 16 rows by 8 columns each, as lanes hold them: four registers for eight columns.
pub(crate) fn multiply_add(
    of: Type,
    rows: &[[f64; 16]],
    columns: &[[f64; 16]],
    sums: &mut [[u64; LANES]],
    keep: bool,
) {
    let k = depth(of);
    for (index, words) in sums.iter_mut().enumerate() {
        for (lane, word) in words.iter_mut().enumerate() {
            let row = &rows[lane / 4 + index % 4 / 2 * 8];
            let column = &columns[index / 4 * 8 + lane % 4 * 2 + index % 2];
            let before = if keep { f64::from(f32::from_bits(*word as u32)) } else { 0.0 };
            let products = if k == 8 { dot::<8>(row, column) } else { dot::<16>(row, column) };
            *word = cut_off(before + products).to_bits().into();
        }
    }
}

/// Sum of products, four sums side by side: one after the other each would wait for the one before.
#[inline(always)]
fn dot<const K: usize>(row: &[f64; 16], column: &[f64; 16]) -> f64 {
    let mut sums = [0.0; 4];
    for at in (0..K).step_by(4) {
        for (side, sum) in sums.iter_mut().enumerate() {
            *sum += row[at + side] * column[at + side];
        }
    }
    sums[0] + sums[1] + (sums[2] + sums[3])
}
