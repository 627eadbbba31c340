//! What a kernel is made of.

/// A register's number in its kernel.
pub(crate) type Register = u32;

/// A kernel.
#[derive(Clone, Debug)]
pub struct Module {
    pub(crate) name: String,
    pub(crate) param_bytes: u32,
    pub(crate) registers: u32,
    /// Where the shared memory starts that the launch adds.
    pub(crate) dynamic_at: u32,
    /// Blocks of a cluster, neighbours along the first axis.
    pub(crate) cluster: u32,
    pub(crate) code: Vec<Instruction>,
}

#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub guard: Option<Guard>,
    pub op: Op,
    pub line: u32,
}

/// An instruction is for the lanes alone whose predicate is set, or is not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub register: Register,
    pub negated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operand {
    Register(Register),
    Number(u64),
    Special(Special),
    /// Where the shared memory starts that the launch adds.
    Dynamic,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Special {
    /// `%tid`, `%ntid`, `%ctaid`, `%nctaid`, of an axis.
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
    /// The block's number in its cluster.
    Rank,
}

impl Special {
    pub fn parse(text: &str) -> Option<Special> {
        match text {
            "%laneid" => return Some(Special::Lane),
            "%cluster_ctarank" => return Some(Special::Rank),
            _ => {}
        }
        let (name, axis) = text.rsplit_once('.')?;
        let axis = ["x", "y", "z"].iter().position(|&known| known == axis)?;
        Some(match name {
            "%tid" => Special::Thread(axis),
            "%ntid" => Special::Threads(axis),
            "%ctaid" => Special::Block(axis),
            "%nctaid" => Special::Blocks(axis),
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub base: Operand,
    pub offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Space {
    Param,
    Shared,
    Global,
    Generic,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Type {
    B8,
    B16,
    B32,
    B64,
    S8,
    S16,
    S32,
    S64,
    F16,
    BF16,
    TF32,
    F32,
    F64,
    /// Two of 16 bits.
    U16x2,
    Predicate,
}

impl Type {
    pub fn parse(name: &str) -> Option<Type> {
        Some(match name {
            "b8" | "u8" => Type::B8,
            "b16" | "u16" => Type::B16,
            "b32" | "u32" => Type::B32,
            "b64" | "u64" => Type::B64,
            "s8" => Type::S8,
            "s16" => Type::S16,
            "s32" => Type::S32,
            "s64" => Type::S64,
            "f16" => Type::F16,
            "bf16" => Type::BF16,
            "tf32" => Type::TF32,
            "f32" => Type::F32,
            "f64" => Type::F64,
            "u16x2" => Type::U16x2,
            "pred" => Type::Predicate,
            _ => return None,
        })
    }

    pub fn bytes(self) -> usize {
        match self {
            Type::B8 | Type::S8 | Type::Predicate => 1,
            Type::B16 | Type::S16 | Type::F16 | Type::BF16 => 2,
            Type::B32 | Type::S32 | Type::F32 | Type::TF32 | Type::U16x2 => 4,
            Type::B64 | Type::S64 | Type::F64 => 8,
        }
    }

    pub fn bits(self) -> u32 {
        self.bytes() as u32 * 8
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// As those, and true where one is no number.
    EqU,
    NeU,
    LtU,
    LeU,
    GtU,
    GeU,
}

impl Compare {
    pub fn parse(name: &str) -> Option<Compare> {
        Some(match name {
            "eq" => Compare::Eq,
            "ne" => Compare::Ne,
            "lt" | "lo" => Compare::Lt,
            "le" | "ls" => Compare::Le,
            "gt" | "hi" => Compare::Gt,
            "ge" | "hs" => Compare::Ge,
            "equ" => Compare::EqU,
            "neu" => Compare::NeU,
            "ltu" => Compare::LtU,
            "leu" => Compare::LeU,
            "gtu" => Compare::GtU,
            "geu" => Compare::GeU,
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Round {
    None,
    NearestInteger,
    TruncatedInteger,
    /// To [0, 1].
    Saturate,
    /// To nearest, ties away from zero.
    Away,
}

impl Round {
    pub fn parse(parts: &[&str]) -> Round {
        let known = [
            ("rni", Round::NearestInteger),
            ("rzi", Round::TruncatedInteger),
            ("sat", Round::Saturate),
            ("rna", Round::Away),
        ];
        known.into_iter().find(|(name, _)| parts.contains(name)).map_or(Round::None, |(_, round)| round)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Function {
    Add,
    Sub,
    Mul,
    MulHigh,
    MulWide,
    Mad,
    Fma,
    FmaDown,
    Div,
    Rem,
    Reciprocal,
    Exp2,
    Root,
    Min,
    Max,
    /// What is no number wins.
    MaxOrNan,
    Abs,
    Neg,
    Not,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
    LeadingZeros,
    Ones,
    InsertField,
    PermuteBytes,
    CopySign,
    Select,
    Move,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Vote {
    Any,
    All,
    Ballot,
    Count,
}

/// What a thread says of its copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Copy {
    Commit,
    Wait(usize),
    WaitAll,
    BulkCommit,
    BulkWait(usize),
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Nothing,
    /// All lanes have to be there.
    AlignedNothing,
    Compute {
        of: Function,
        ty: Type,
        to: Register,
        /// Zero where a function takes fewer.
        from: [Operand; 4],
    },
    SetPredicate {
        compare: Compare,
        ty: Type,
        to: Register,
        a: Operand,
        b: Operand,
    },
    Convert {
        round: Round,
        to_type: Type,
        from_type: Type,
        to: Register,
        from: Operand,
    },
    ConvertTwo {
        of: Type,
        to: Register,
        high: Operand,
        low: Operand,
    },
    /// Of two fp16 side by side each one's product.
    MultiplyTwo {
        to: Register,
        a: Operand,
        b: Operand,
    },
    Pack {
        to: Register,
        from: Vec<Operand>,
        bits: u32,
    },
    Unpack {
        to: Vec<Register>,
        from: Operand,
        bits: u32,
    },
    Load {
        space: Space,
        ty: Type,
        to: Vec<Register>,
        from: Address,
    },
    Store {
        space: Space,
        ty: Type,
        to: Address,
        from: Vec<Operand>,
    },
    /// To an instruction's number.
    Branch(usize),
    Exit,
    WarpSync {
        mask: Operand,
    },
    Barrier {
        id: Operand,
        threads: Option<Operand>,
        vote: Option<(Vote, Register, Operand)>,
    },
    Shuffle {
        mode: String,
        to: Register,
        found: Option<Register>,
        from: Operand,
        lane: Operand,
        clamp: Operand,
        mask: Operand,
    },
    Vote {
        vote: Vote,
        to: Register,
        from: Operand,
        mask: Operand,
    },
    Reduce {
        of: Function,
        ty: Type,
        to: Register,
        from: Operand,
        mask: Operand,
    },
    Atomic {
        of: Function,
        space: Space,
        ty: Type,
        to: Register,
        at: Address,
        from: Operand,
    },
    BarrierInit {
        at: Address,
        count: Operand,
    },
    /// With bytes that are expected, or none.
    BarrierArrive {
        at: Address,
        bytes: Option<Operand>,
    },
    BarrierWait {
        to: Register,
        at: Address,
        parity: Operand,
    },
    /// Whether a phase is over, for a warp that has other things to do.
    BarrierTest {
        to: Register,
        at: Address,
        parity: Operand,
    },
    BulkLoad {
        to: Address,
        from: Address,
        bytes: Operand,
        barrier: Address,
    },
    BulkStore {
        to: Address,
        from: Address,
        bytes: Operand,
    },
    CopyAsync {
        to: Address,
        from: Address,
        bytes: usize,
        source: Option<Operand>,
    },
    Copies(Copy),
    /// A barrier is arrived at once the thread's copies have come.
    CopiesArrive {
        at: Address,
    },
    ProxyFence,
    /// The address in another block's shared memory.
    MapShared {
        to: Register,
        from: Operand,
        rank: Operand,
    },
    ClusterArrive,
    ClusterWait,
    LoadMatrix {
        to: Vec<Register>,
        from: Address,
        transposed: bool,
    },
    StoreMatrix {
        to: Address,
        from: Vec<Register>,
        transposed: bool,
    },
    Multiply {
        of: Type,
        to: Vec<Register>,
        a: Vec<Register>,
        b: Vec<Register>,
        c: Vec<Register>,
    },
    GroupMultiply {
        of: Type,
        to: Vec<Register>,
        a: Operand,
        a_registers: Vec<Register>,
        b: Operand,
        keep: Operand,
        transposed: bool,
    },
    GroupCommit,
    GroupWait(usize),
}
