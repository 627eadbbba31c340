//! From text to instructions.

use crate::instruction::{
    Address, Compare, Copy, Function, Guard, Instruction, Module, Op, Operand, Register, Round, Space,
    Special, Type, Vote,
};
use crate::{Fault, Result};
use std::collections::HashMap;

/// Where a block's shared memory starts: a launch keeps what is before.
pub(crate) const SHARED_BASE: u32 = 1024;

/// What names mean between two braces.
#[derive(Default)]
struct Scope {
    registers: HashMap<String, Register>,
    /// Registers `%r0`, `%r1` and on, by what is before the number.
    ranges: HashMap<String, (Register, u32)>,
    labels: HashMap<String, usize>,
}

/// A module that is being read.
struct Parser<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    scopes: Vec<Scope>,
    /// The scopes that are open, innermost last.
    open: Vec<usize>,
    registers: u32,
    /// Names in shared memory, and where they are.
    shared: HashMap<String, u32>,
    shared_bytes: u32,
    /// Of the shared memory that the launch adds: its name and alignment.
    dynamic: Option<(String, u32)>,
    params: HashMap<String, u32>,
    cluster: u32,
    code: Vec<Instruction>,
    /// Instructions that jump: where to, by name, and the scopes then open.
    jumps: Vec<(usize, String, Vec<usize>)>,
}

/// Reads a module of one kernel.
pub(crate) fn module(text: &str) -> Result<Module> {
    let mut parser = Parser {
        text,
        at: 0,
        line: 1,
        scopes: vec![Scope::default()],
        open: vec![0],
        registers: 0,
        shared: HashMap::new(),
        shared_bytes: 0,
        dynamic: None,
        params: HashMap::new(),
        cluster: 1,
        code: Vec::new(),
        jumps: Vec::new(),
    };
    let entry = text.find(".entry").ok_or_else(|| Fault::new("no kernel"))?;
    parser.header(&text[..entry])?;
    parser.skip_to(entry + ".entry".len());
    let (name, param_bytes) = parser.signature()?;
    parser.body()?;
    parser.finish(name, param_bytes)
}

impl<'a> Parser<'a> {
    fn fail<T>(&self, what: impl std::fmt::Display) -> Result<T> {
        Err(Fault::new(format!("line {}: {what}", self.line)))
    }

    fn skip_to(&mut self, at: usize) {
        self.line += self.text[self.at..at].matches('\n').count() as u32;
        self.at = at;
    }

    /// What is outside of the kernel: shared memory of a size that the launch gives.
    fn header(&mut self, text: &str) -> Result<()> {
        for line in text.lines().map(str::trim).filter(|line| line.starts_with(".extern .shared")) {
            let words: Vec<&str> = line.trim_end_matches(';').split_whitespace().collect();
            let align = words
                .iter()
                .position(|&word| word == ".align")
                .and_then(|at| words.get(at + 1)?.parse().ok());
            let name = words.last().map(|name| name.trim_end_matches("[]").to_string());
            let (Some(align), Some(name)) = (align, name) else { return self.fail(line) };
            self.dynamic = Some((name, align));
        }
        Ok(())
    }

    /// The kernel's name and parameters.
    fn signature(&mut self) -> Result<(String, u32)> {
        let rest = &self.text[self.at..];
        let (Some(open), Some(close)) = (rest.find('('), rest.find(')')) else {
            return self.fail("no parameters");
        };
        let name = rest[..open].trim().to_string();
        let mut bytes = 0u32;
        for param in rest[open + 1..close].split(',').map(str::trim).filter(|param| !param.is_empty()) {
            let words: Vec<&str> = param.split_whitespace().collect();
            let [".param", of, name] = words[..] else { return self.fail(param) };
            let size = self.of_type(of.trim_start_matches('.'))?.bytes() as u32;
            bytes = bytes.next_multiple_of(size);
            self.params.insert(name.to_string(), bytes);
            bytes += size;
        }
        let Some(brace) = rest[close..].find('{') else { return self.fail("no body") };
        // Blocks of a cluster along each axis.
        let directives = rest[close + 1..close + brace].lines().map(str::trim);
        for blocks in directives.filter_map(|line| line.strip_prefix(".reqnctapercluster")) {
            let blocks: Vec<_> = blocks.split(',').map(|count| count.trim().parse::<u32>()).collect();
            let [Ok(cluster), Ok(1), Ok(1)] = blocks[..] else { return self.fail("the cluster's blocks") };
            self.cluster = cluster;
        }
        self.skip_to(self.at + close + brace + 1);
        Ok((name, bytes))
    }

    fn of_type(&self, name: &str) -> Result<Type> {
        Type::parse(name).map_or_else(|| self.fail(format!("type {name}")), Ok)
    }

    /// Statements up to the brace that ends the kernel.
    fn body(&mut self) -> Result<()> {
        loop {
            let rest = &self.text[self.at..];
            let trimmed = rest.trim_start();
            self.skip_to(self.at + rest.len() - trimmed.len());
            if trimmed.is_empty() {
                return self.fail("the kernel does not end");
            } else if trimmed.starts_with("//") {
                let end = trimmed.find('\n').unwrap_or(trimmed.len());
                self.skip_to(self.at + end);
            } else if trimmed.starts_with('{') {
                self.scopes.push(Scope::default());
                self.open.push(self.scopes.len() - 1);
                self.skip_to(self.at + 1);
            } else if trimmed.starts_with('}') {
                self.open.pop();
                self.skip_to(self.at + 1);
                if self.open.is_empty() {
                    return Ok(());
                }
            } else if let Some(label) = label(trimmed) {
                let scope = self.innermost();
                self.scopes[scope].labels.insert(label.to_string(), self.code.len());
                self.skip_to(self.at + label.len() + 1);
            } else {
                let Some(end) = trimmed.find(';') else { return self.fail("a statement does not end") };
                self.statement(&trimmed[..end])?;
                self.skip_to(self.at + end + 1);
            }
        }
    }

    fn innermost(&self) -> usize {
        *self.open.last().expect("the kernel's scope is open")
    }

    fn statement(&mut self, text: &str) -> Result<()> {
        let text = text.trim();
        if let Some(rest) = text.strip_prefix(".reg") {
            return self.declare(rest.trim());
        }
        if let Some(rest) = text.strip_prefix(".shared") {
            return self.shared(rest.trim());
        }
        if text.starts_with(".pragma") {
            return Ok(());
        }
        let (guard, text) = match text.strip_prefix('@') {
            None => (None, text),
            Some(rest) => {
                let (name, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                let negated = name.starts_with('!');
                let register = self.register(name.trim_start_matches('!'))?;
                (Some(Guard { register, negated }), rest.trim())
            }
        };
        let (name, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let operands = split(operands.trim());
        let op = self.op(name, &operands)?;
        if let Op::Branch(_) = op {
            self.jumps.push((self.code.len(), operands[0].to_string(), self.open.clone()));
        }
        self.code.push(Instruction { guard, op, line: self.line });
        Ok(())
    }

    fn declare(&mut self, text: &str) -> Result<()> {
        let Some((_, names)) = text.split_once(char::is_whitespace) else { return self.fail(text) };
        let scope = self.innermost();
        for name in names.split(',').map(str::trim) {
            if let Some((name, count)) = name.split_once('<') {
                let Ok(count) = count.trim_end_matches('>').parse::<u32>() else { return self.fail(text) };
                self.scopes[scope].ranges.insert(name.to_string(), (self.registers, count));
                self.registers += count;
            } else {
                self.scopes[scope].registers.insert(name.to_string(), self.registers);
                self.registers += 1;
            }
        }
        Ok(())
    }

    fn shared(&mut self, text: &str) -> Result<()> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [".align", align, of, name] = words[..] else { return self.fail(text) };
        let (name, count) = match name.split_once('[') {
            None => (name, 1),
            Some((name, count)) => (name, count.trim_end_matches(']').parse().unwrap_or(0)),
        };
        let Ok(align) = align.parse::<u32>() else { return self.fail(text) };
        let at = self.shared_bytes.next_multiple_of(align);
        self.shared.insert(name.to_string(), SHARED_BASE + at);
        self.shared_bytes = at + count * self.of_type(of.trim_start_matches('.'))?.bytes() as u32;
        Ok(())
    }

    fn register(&self, name: &str) -> Result<Register> {
        for &scope in self.open.iter().rev() {
            let scope = &self.scopes[scope];
            if let Some(&register) = scope.registers.get(name) {
                return Ok(register);
            }
            let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
            let (prefix, number) = name.split_at(name.len() - digits);
            if let (Some(&(first, count)), Ok(number)) = (scope.ranges.get(prefix), number.parse::<u32>())
                && number < count
            {
                return Ok(first + number);
            }
        }
        self.fail(format!("no register {name}"))
    }

    /// A register, a number, a special register or an address by its name.
    fn operand(&self, text: &str) -> Result<Operand> {
        if let Some(special) = Special::parse(text) {
            return Ok(Operand::Special(special));
        }
        if text.starts_with('%') || self.register(text).is_ok() {
            return Ok(Operand::Register(self.register(text)?));
        }
        if let Some(value) = number(text) {
            return Ok(Operand::Number(value));
        }
        if let Some(&at) = self.shared.get(text) {
            return Ok(Operand::Number(at.into()));
        }
        match &self.dynamic {
            Some((dynamic, _)) if dynamic == text => Ok(Operand::Dynamic),
            _ => self.fail(format!("nothing is called {text}")),
        }
    }

    fn address(&self, text: &str) -> Result<Address> {
        let Some(inside) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) else {
            return self.fail(format!("address {text}"));
        };
        let (name, offset) = inside.split_once('+').unwrap_or((inside, "0"));
        let Some(offset) = number(offset.trim()) else { return self.fail(format!("address {text}")) };
        let base = match self.params.get(name.trim()) {
            Some(&at) => Operand::Number(at.into()),
            None => self.operand(name.trim())?,
        };
        Ok(Address { base, offset: offset as i64 })
    }

    /// The registers of `{a, b}`, or one.
    fn registers(&self, text: &str) -> Result<Vec<Register>> {
        list(text).into_iter().map(|name| self.register(name)).collect()
    }

    fn operands(&self, text: &str) -> Result<Vec<Operand>> {
        list(text).into_iter().map(|name| self.operand(name)).collect()
    }

    fn op(&self, name: &str, operands: &[&str]) -> Result<Op> {
        let parts: Vec<&str> = name.split('.').collect();
        let has = |part: &str| parts.contains(&part);
        let last = *parts.last().expect("a name has a part");
        let register = |at: usize| match operands.get(at) {
            Some(text) => self.register(text),
            None => self.fail(format!("{name} lacks operands")),
        };
        let operand = |at: usize| match operands.get(at) {
            Some(text) => self.operand(text),
            None => self.fail(format!("{name} lacks operands")),
        };
        let address = |at: usize| match operands.get(at) {
            Some(text) => self.address(text),
            None => self.fail(format!("{name} lacks operands")),
        };
        let ty = || self.of_type(last);
        let space = || {
            let spaces = [
                ("param", Space::Param),
                ("shared", Space::Shared),
                ("shared::cluster", Space::Shared),
                ("global", Space::Global),
            ];
            spaces.into_iter().find(|(part, _)| has(part)).map_or(Space::Generic, |(_, space)| space)
        };
        let function = |of: Function, count: usize| -> Result<Op> {
            let mut from = [Operand::Number(0); 4];
            for (at, from) in from.iter_mut().enumerate().take(count) {
                *from = operand(at + 1)?;
            }
            Ok(Op::Compute { of, ty: ty()?, to: register(0)?, from })
        };
        Ok(match parts[0] {
            "add" => function(Function::Add, 2)?,
            "sub" => function(Function::Sub, 2)?,
            "mul" if has("wide") => function(Function::MulWide, 2)?,
            "mul" if has("hi") => function(Function::MulHigh, 2)?,
            "mul" if has("f16x2") => Op::MultiplyTwo { to: register(0)?, a: operand(1)?, b: operand(2)? },
            "mul" => function(Function::Mul, 2)?,
            "mad" => function(Function::Mad, 3)?,
            "fma" if has("rm") => function(Function::FmaDown, 3)?,
            "fma" => function(Function::Fma, 3)?,
            "div" => function(Function::Div, 2)?,
            "rem" => function(Function::Rem, 2)?,
            "rcp" => function(Function::Reciprocal, 1)?,
            "ex2" => function(Function::Exp2, 1)?,
            "sqrt" => function(Function::Root, 1)?,
            "min" => function(Function::Min, 2)?,
            "max" if has("NaN") => function(Function::MaxOrNan, 2)?,
            "max" => function(Function::Max, 2)?,
            "abs" => function(Function::Abs, 1)?,
            "neg" => function(Function::Neg, 1)?,
            "not" => function(Function::Not, 1)?,
            "and" => function(Function::And, 2)?,
            "or" => function(Function::Or, 2)?,
            "xor" => function(Function::Xor, 2)?,
            "shl" => function(Function::ShiftLeft, 2)?,
            "shr" => function(Function::ShiftRight, 2)?,
            "clz" => function(Function::LeadingZeros, 1)?,
            "popc" => function(Function::Ones, 1)?,
            "bfi" => function(Function::InsertField, 4)?,
            "prmt" => function(Function::PermuteBytes, 3)?,
            "copysign" => function(Function::CopySign, 2)?,
            "selp" => function(Function::Select, 3)?,
            "mov" if operands[0].starts_with('{') => {
                Op::Unpack { to: self.registers(operands[0])?, from: operand(1)?, bits: ty()?.bits() }
            }
            "mov" if operands[1].starts_with('{') => {
                Op::Pack { to: register(0)?, from: self.operands(operands[1])?, bits: ty()?.bits() }
            }
            "mov" => function(Function::Move, 1)?,
            "cvta" => Op::Compute {
                of: Function::Move,
                ty: Type::B64,
                to: register(0)?,
                from: [operand(1)?, Operand::Number(0), Operand::Number(0), Operand::Number(0)],
            },
            "setp" => {
                let Some(compare) = Compare::parse(parts[1]) else { return self.fail(name) };
                Op::SetPredicate { compare, ty: ty()?, to: register(0)?, a: operand(1)?, b: operand(2)? }
            }
            "cvt" if has("f16x2") || has("bf16x2") => {
                let of = if has("f16x2") { Type::F16 } else { Type::BF16 };
                Op::ConvertTwo { of, to: register(0)?, high: operand(1)?, low: operand(2)? }
            }
            "cvt" => {
                let round = Round::parse(&parts);
                let to_type = self.of_type(parts[parts.len() - 2])?;
                Op::Convert { round, to_type, from_type: ty()?, to: register(0)?, from: operand(1)? }
            }
            "ld" => {
                Op::Load { space: space(), ty: ty()?, to: self.registers(operands[0])?, from: address(1)? }
            }
            "st" => {
                Op::Store { space: space(), ty: ty()?, to: address(0)?, from: self.operands(operands[1])? }
            }
            "bra" => Op::Branch(usize::MAX),
            "ret" | "exit" => Op::Exit,
            "bar" if parts[1] == "warp" => Op::WarpSync { mask: operand(0)? },
            "bar" if parts[1] == "red" => {
                let vote = if has("popc") {
                    Vote::Count
                } else if has("or") {
                    Vote::Any
                } else {
                    Vote::All
                };
                Op::Barrier {
                    id: operand(1)?,
                    threads: (operands.len() == 4).then(|| operand(2)).transpose()?,
                    vote: Some((vote, register(0)?, operand(operands.len() - 1)?)),
                }
            }
            "bar" => Op::Barrier {
                id: operand(0)?,
                threads: operands.get(1).map(|_| operand(1)).transpose()?,
                vote: None,
            },
            "shfl" => {
                let (to, found) = operands[0].split_once('|').unwrap_or((operands[0], ""));
                let found = if found.is_empty() { None } else { Some(self.register(found)?) };
                let to = self.register(to)?;
                Op::Shuffle {
                    mode: parts[2].to_string(),
                    to,
                    found,
                    from: operand(1)?,
                    lane: operand(2)?,
                    clamp: operand(3)?,
                    mask: operand(4)?,
                }
            }
            "vote" => {
                let vote = match parts[2] {
                    "any" => Vote::Any,
                    "all" => Vote::All,
                    "ballot" => Vote::Ballot,
                    _ => return self.fail(name),
                };
                Op::Vote { vote, to: register(0)?, from: operand(1)?, mask: operand(2)? }
            }
            "redux" => {
                let of = match parts[2] {
                    "max" => Function::Max,
                    "or" => Function::Or,
                    _ => return self.fail(name),
                };
                Op::Reduce { of, ty: ty()?, to: register(0)?, from: operand(1)?, mask: operand(2)? }
            }
            "atom" => {
                let of = match parts[parts.len() - 2] {
                    "add" => Function::Add,
                    "max" => Function::Max,
                    _ => return self.fail(name),
                };
                Op::Atomic {
                    of,
                    space: space(),
                    ty: ty()?,
                    to: register(0)?,
                    at: address(1)?,
                    from: operand(2)?,
                }
            }
            "mapa" => Op::MapShared { to: register(0)?, from: operand(1)?, rank: operand(2)? },
            "barrier" if has("cluster") && has("arrive") => Op::ClusterArrive,
            "barrier" if has("cluster") && has("wait") => Op::ClusterWait,
            "mbarrier" if parts[1] == "init" => Op::BarrierInit { at: address(0)?, count: operand(1)? },
            "mbarrier" if has("expect_tx") => Op::BarrierArrive { at: address(1)?, bytes: Some(operand(2)?) },
            "mbarrier" if parts[1] == "arrive" => Op::BarrierArrive { at: address(1)?, bytes: None },
            "mbarrier" if has("try_wait") => {
                Op::BarrierWait { to: register(0)?, at: address(1)?, parity: operand(2)? }
            }
            "mbarrier" if has("test_wait") => {
                Op::BarrierTest { to: register(0)?, at: address(1)?, parity: operand(2)? }
            }
            "cp" if has("bulk") => match (parts[3], last) {
                ("shared::cluster", _) => Op::BulkLoad {
                    to: address(0)?,
                    from: address(1)?,
                    bytes: operand(2)?,
                    barrier: address(3)?,
                },
                ("global", _) => Op::BulkStore { to: address(0)?, from: address(1)?, bytes: operand(2)? },
                ("commit_group", _) => Op::Copies(Copy::BulkCommit),
                ("wait_group", _) => Op::Copies(Copy::BulkWait(self.count(operands)?)),
                _ => return self.fail(name),
            },
            "cp" if has("commit_group") => Op::Copies(Copy::Commit),
            "cp" if has("wait_group") => Op::Copies(Copy::Wait(self.count(operands)?)),
            "cp" if has("wait_all") => Op::Copies(Copy::WaitAll),
            "cp" if has("mbarrier") => Op::CopiesArrive { at: address(0)? },
            "cp" => {
                let Some(Operand::Number(bytes)) = operand(2).ok() else { return self.fail(name) };
                let source = operands.get(3).map(|_| operand(3)).transpose()?;
                Op::CopyAsync { to: address(0)?, from: address(1)?, bytes: bytes as usize, source }
            }
            "ldmatrix" => Op::LoadMatrix {
                to: self.registers(operands[0])?,
                from: address(1)?,
                transposed: has("trans"),
            },
            "stmatrix" => Op::StoreMatrix {
                to: address(0)?,
                from: self.registers(operands[1])?,
                transposed: has("trans"),
            },
            "mma" => Op::Multiply {
                of: self.of_type(parts[parts.len() - 2])?,
                to: self.registers(operands[0])?,
                a: self.registers(operands[1])?,
                b: self.registers(operands[2])?,
                c: self.registers(operands[3])?,
            },
            "wgmma" if parts[1] == "mma_async" => {
                let in_registers = operands[1].starts_with('{');
                let (a, a_registers) = if in_registers {
                    (Operand::Number(0), self.registers(operands[1])?)
                } else {
                    (operand(1)?, Vec::new())
                };
                let transposed = operands.last().is_some_and(|last| *last == "1") && operands.len() > 6;
                Op::GroupMultiply {
                    of: ty()?,
                    to: self.registers(operands[0])?,
                    a,
                    a_registers,
                    b: operand(2)?,
                    keep: operand(3)?,
                    transposed,
                }
            }
            "wgmma" if parts[1] == "wait_group" => Op::GroupWait(self.count(operands)?),
            "wgmma" if parts[1] == "commit_group" => Op::GroupCommit,
            "wgmma" => Op::AlignedNothing,
            "setmaxnreg" => Op::AlignedNothing,
            "fence" if has("proxy") => Op::ProxyFence,
            "fence" | "griddepcontrol" | "membar" | "nanosleep" | "prefetch" => Op::Nothing,
            _ => return self.fail(format!("unknown instruction {name}")),
        })
    }

    fn count(&self, operands: &[&str]) -> Result<usize> {
        match operands.first().and_then(|text| number(text)) {
            Some(count) => Ok(count as usize),
            None => self.fail("a count"),
        }
    }

    /// Fills in where jumps lead, and where the launch's shared memory starts.
    fn finish(mut self, name: String, param_bytes: u32) -> Result<Module> {
        for (at, label, scopes) in std::mem::take(&mut self.jumps) {
            let found = scopes.iter().rev().find_map(|&scope| self.scopes[scope].labels.get(&label));
            let Some(&target) = found else { return self.fail(format!("no label {label}")) };
            self.code[at].op = Op::Branch(target);
        }
        let dynamic = self.dynamic.as_ref().map_or(16, |(_, align)| *align);
        let dynamic_at = (SHARED_BASE + self.shared_bytes).next_multiple_of(dynamic);
        let (registers, cluster) = (self.registers, self.cluster);
        Ok(Module { name, param_bytes, registers, dynamic_at, cluster, code: self.code })
    }
}

/// A label at the start of a text.
fn label(text: &str) -> Option<&str> {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$'))?;
    (end > 0 && text[end..].starts_with(':')).then(|| &text[..end])
}

/// Operands, which commas part outside of braces.
fn split(text: &str) -> Vec<&str> {
    let (mut found, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let rest = text[start..].trim();
    found.extend((!rest.is_empty()).then_some(rest));
    found
}

fn list(text: &str) -> Vec<&str> {
    match text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
        Some(inside) => inside.split(',').map(str::trim).collect(),
        None => vec![text],
    }
}

/// A number as bits.
fn number(text: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0d")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    if let Some(bits) = text.strip_prefix("0x") {
        return u64::from_str_radix(bits, 16).ok();
    }
    text.parse::<i64>().map(|value| value as u64).ok().or_else(|| text.parse().ok())
}
