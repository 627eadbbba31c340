//! What instructions compute of one lane's numbers, which are bits in 64.

use crate::LANES;
use crate::instruction::{Compare, Function, Round, Type};
use crate::warp::{Lanes, lanes};
use half::{bf16, f16};

fn f(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn of(value: f32) -> u64 {
    value.to_bits().into()
}

fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// A signed number of a type.
#[inline(always)]
fn signed(ty: Type, bits: u64) -> i64 {
    match ty.bits() {
        8 => (bits as i8).into(),
        16 => (bits as i16).into(),
        32 => (bits as i32).into(),
        _ => bits as i64,
    }
}

/// Bits within a type's width.
#[inline(always)]
fn cut(ty: Type, bits: u64) -> u64 {
    if ty.bits() == 64 { bits } else { bits & ((1 << ty.bits()) - 1) }
}

/// What a function gives for up to four numbers; nothing if there is none of the type.
#[inline(always)]
pub(crate) fn compute(function: Function, ty: Type, [a, b, c, e]: [u64; 4]) -> Option<u64> {
    match function {
        Function::Move => return Some(cut(ty, a)),
        Function::Select => return Some(cut(ty, if c & 1 == 1 { a } else { b })),
        _ => {}
    }
    match ty {
        Type::F32 => float(function, f(a), f(b), f(c)).map(of),
        Type::F64 => double(function, d(a), d(b), d(c)).map(f64::to_bits),
        Type::U16x2 if function == Function::Max => {
            let max = |shift: u32| (a >> shift & 0xffff).max(b >> shift & 0xffff) << shift;
            Some(max(0) | max(16))
        }
        Type::Predicate => match function {
            Function::And => Some(a & b & 1),
            Function::Or => Some((a | b) & 1),
            Function::Xor => Some((a ^ b) & 1),
            Function::Not => Some(!a & 1),
            _ => None,
        },
        Type::F16 | Type::BF16 | Type::TF32 | Type::U16x2 => None,
        _ => integer(function, ty, [a, b, c, e]).map(|bits| match function {
            Function::MulWide => bits,
            _ => cut(ty, bits),
        }),
    }
}

/// The same for the lanes of a mask. What most instructions compute is chosen once for all
/// lanes, and what those outside of the mask are given then is not used.
pub(crate) fn compute_all(function: Function, ty: Type, numbers: [&Lanes; 4], mask: u32) -> Option<Lanes> {
    macro_rules! chosen {
        ($($name:ident: $($kind:ident)+,)*) => {
            match (function, ty) {
                $($((Function::$name, Type::$kind) => {
                    of_lanes(0..LANES, numbers, |of| compute(Function::$name, Type::$kind, of))
                })+)*
                _ => of_lanes(lanes(mask), numbers, |of| compute(function, ty, of)),
            }
        };
    }
    chosen! {
        Move: B32 S32 F32 B64 S64,
        Select: B32 S32 F32,
        Add: B32 S32 B64 S64 F32,
        Sub: B32 S32 F32,
        Mul: B32 S32 F32,
        Mad: B32 S32,
        And: B32,
        Or: B32,
        Xor: B32,
    }
}

/// What comes of each lane's numbers; nothing if nothing does of one's.
#[inline(always)]
fn of_lanes(
    lanes: impl Iterator<Item = usize>,
    [a, b, c, e]: [&Lanes; 4],
    of: impl Fn([u64; 4]) -> Option<u64>,
) -> Option<Lanes> {
    let mut result = [0; LANES];
    for lane in lanes {
        result[lane] = of([a[lane], b[lane], c[lane], e[lane]])?;
    }
    Some(result)
}

#[inline(always)]
fn float(function: Function, a: f32, b: f32, c: f32) -> Option<f32> {
    Some(match function {
        Function::Add => a + b,
        Function::Sub => a - b,
        Function::Mul => a * b,
        Function::Fma => a.mul_add(b, c),
        Function::FmaDown => {
            // Exact but for a last bit of double precision.
            let exact = f64::from(a).mul_add(f64::from(b), f64::from(c));
            let near = exact as f32;
            if f64::from(near) > exact { near.next_down() } else { near }
        }
        Function::Div => a / b,
        Function::Reciprocal => 1.0 / a,
        Function::Exp2 => a.exp2(),
        Function::Root => a.sqrt(),
        Function::Min => a.min(b),
        Function::Max => a.max(b),
        Function::MaxOrNan if a.is_nan() || b.is_nan() => f32::NAN,
        Function::MaxOrNan => a.max(b),
        Function::Abs => a.abs(),
        Function::Neg => -a,
        Function::CopySign => b.copysign(a),
        _ => return None,
    })
}

fn double(function: Function, a: f64, b: f64, c: f64) -> Option<f64> {
    Some(match function {
        Function::Add => a + b,
        Function::Sub => a - b,
        Function::Mul => a * b,
        Function::Fma => a.mul_add(b, c),
        Function::Div => a / b,
        Function::Reciprocal => 1.0 / a,
        Function::Root => a.sqrt(),
        Function::Min => a.min(b),
        Function::Max => a.max(b),
        Function::Abs => a.abs(),
        Function::Neg => -a,
        Function::CopySign => b.copysign(a),
        _ => return None,
    })
}

#[inline(always)]
fn integer(function: Function, ty: Type, [a, b, c, e]: [u64; 4]) -> Option<u64> {
    let (bits, is_signed) = (ty.bits(), ty.is_signed());
    let (sa, sb) = (signed(ty, a), signed(ty, b));
    let (ua, ub) = (cut(ty, a), cut(ty, b));
    Some(match function {
        Function::Add => a.wrapping_add(b),
        Function::Sub => a.wrapping_sub(b),
        Function::Mul => a.wrapping_mul(b),
        Function::MulWide if is_signed => sa.wrapping_mul(sb) as u64,
        Function::MulWide => ua.wrapping_mul(ub),
        Function::MulHigh if is_signed => ((i128::from(sa) * i128::from(sb)) >> bits) as u64,
        Function::MulHigh => ((u128::from(ua) * u128::from(ub)) >> bits) as u64,
        Function::Mad => a.wrapping_mul(b).wrapping_add(c),
        // Of a division by zero the GPU makes all ones.
        Function::Div | Function::Rem if ub == 0 => u64::MAX,
        Function::Div if is_signed => sa.wrapping_div(sb) as u64,
        Function::Div => ua / ub,
        Function::Rem if is_signed => sa.wrapping_rem(sb) as u64,
        Function::Rem => ua % ub,
        Function::Min if is_signed => sa.min(sb) as u64,
        Function::Min => ua.min(ub),
        Function::Max if is_signed => sa.max(sb) as u64,
        Function::Max => ua.max(ub),
        Function::Abs => sa.wrapping_abs() as u64,
        Function::Neg => sa.wrapping_neg() as u64,
        Function::Not => !a,
        Function::And => a & b,
        Function::Or => a | b,
        Function::Xor => a ^ b,
        Function::ShiftLeft if (b as u32) < bits => a << (b as u32),
        Function::ShiftLeft => 0,
        Function::ShiftRight if is_signed => (sa >> (b as u32).min(bits - 1)) as u64,
        Function::ShiftRight if (b as u32) < bits => ua >> (b as u32),
        Function::ShiftRight => 0,
        Function::LeadingZeros => u64::from(ua.leading_zeros() + bits - 64),
        Function::Ones => u64::from(ua.count_ones()),
        Function::InsertField => {
            let (at, length) = ((c & 0xff) as u32, (e & 0xff) as u32);
            let length = length.min(bits.saturating_sub(at));
            let mask = if length == 0 { 0 } else { u64::MAX >> (64 - length) << at };
            ub & !mask | (ua << at.min(63)) & mask
        }
        Function::PermuteBytes => {
            let bytes = ua | ub << 32;
            let byte = |selector: u64| {
                let byte = bytes >> (8 * (selector & 7)) & 0xff;
                if selector & 8 == 0 { byte } else { 0xff * (byte >> 7) }
            };
            (0..4).map(|at| byte(c >> (4 * at) & 0xf) << (8 * at)).sum()
        }
        _ => return None,
    })
}

/// A comparison; nothing if there is none of the type.
pub(crate) fn compare(compare: Compare, ty: Type, a: u64, b: u64) -> Option<bool> {
    let order = match ty {
        Type::F32 => f(a).partial_cmp(&f(b)),
        Type::F64 => d(a).partial_cmp(&d(b)),
        Type::F16 | Type::BF16 | Type::TF32 | Type::U16x2 | Type::Predicate => return None,
        _ if ty.is_signed() => Some(signed(ty, a).cmp(&signed(ty, b))),
        _ => Some(cut(ty, a).cmp(&cut(ty, b))),
    };
    let unordered = order.is_none();
    Some(match compare {
        Compare::Eq => order.is_some_and(|order| order.is_eq()),
        Compare::Ne => order.is_some_and(|order| order.is_ne()),
        Compare::Lt => order.is_some_and(|order| order.is_lt()),
        Compare::Le => order.is_some_and(|order| order.is_le()),
        Compare::Gt => order.is_some_and(|order| order.is_gt()),
        Compare::Ge => order.is_some_and(|order| order.is_ge()),
        Compare::EqU => unordered || order.is_some_and(|order| order.is_eq()),
        Compare::NeU => unordered || order.is_some_and(|order| order.is_ne()),
        Compare::LtU => unordered || order.is_some_and(|order| order.is_lt()),
        Compare::LeU => unordered || order.is_some_and(|order| order.is_le()),
        Compare::GtU => unordered || order.is_some_and(|order| order.is_gt()),
        Compare::GeU => unordered || order.is_some_and(|order| order.is_ge()),
    })
}

/// Whole numbers of a type's range nearest to one.
fn to_integer(ty: Type, value: f64) -> u64 {
    let bits = ty.bits();
    if ty.is_signed() {
        let most = 2f64.powi(bits as i32 - 1);
        value.clamp(-most, most - 1.0) as i64 as u64
    } else {
        value.clamp(0.0, 2f64.powi(bits as i32) - 1.0) as u64
    }
}

/// A number of one type as one of another; nothing if the reader knows no such.
pub(crate) fn convert(round: Round, to: Type, from: Type, bits: u64) -> Option<u64> {
    let is_float = |ty| matches!(ty, Type::F16 | Type::BF16 | Type::F32 | Type::F64);
    if to == Type::TF32 {
        // Ties go away from zero; infinities and what is no number stay so.
        let bits = bits as u32;
        let finite = bits & 0x7f80_0000 != 0x7f80_0000;
        return Some(if finite { u64::from(bits.wrapping_add(0x1000) & 0xffff_e000) } else { bits.into() });
    }
    if !is_float(from) {
        let value = signed(from, bits);
        let unsigned = cut(from, bits);
        return Some(match to {
            Type::F32 if from.is_signed() => of(value as f32),
            Type::F32 => of(unsigned as f32),
            Type::F64 if from.is_signed() => (value as f64).to_bits(),
            Type::F64 => (unsigned as f64).to_bits(),
            Type::F16 | Type::BF16 | Type::U16x2 | Type::Predicate => return None,
            _ if from.is_signed() => cut(to, value as u64),
            _ => cut(to, unsigned),
        });
    }
    let value = match from {
        Type::F16 => f64::from(f16::from_bits(bits as u16)),
        Type::BF16 => f64::from(bf16::from_bits(bits as u16)),
        Type::F32 => f64::from(f(bits)),
        _ => d(bits),
    };
    let value = match round {
        Round::None => value,
        Round::NearestInteger => value.round_ties_even(),
        Round::TruncatedInteger => value.trunc(),
        Round::Saturate if value.is_nan() => 0.0,
        Round::Saturate => value.clamp(0.0, 1.0),
        Round::Away => return None,
    };
    Some(match to {
        Type::F16 => f16::from_f64(value).to_bits().into(),
        Type::BF16 => bf16::from_f64(value).to_bits().into(),
        Type::F32 => of(value as f32),
        Type::F64 => value.to_bits(),
        Type::U16x2 | Type::Predicate | Type::TF32 => return None,
        _ if value.is_nan() => 0,
        _ => to_integer(to, value),
    })
}
