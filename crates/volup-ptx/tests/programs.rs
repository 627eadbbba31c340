//! Small programs: what they compute, and what they may not do.

use volup_ptx::{Launch, Memory, Module};

/// A kernel of two addresses and a number, of such a body.
fn kernel(body: &str) -> Module {
    // A body that starts with a directive is one of clusters.
    let (directive, body) = if body.starts_with('.') { body.split_once('\n').unwrap() } else { ("", body) };
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 128 .b8 memory[];\n\
         .visible .entry program(.param .u64 program_0, .param .u64 program_1, .param .u32 program_2)\n{directive}\n{{\n\
         .reg .pred %p<8>;\n.reg .b32 %r<80>;\n.reg .f32 %f<40>;\n.reg .b64 %rd<16>;\n.reg .b16 %h<8>;\n\
         ld.param.u64 %rd1, [program_0];\nld.param.u64 %rd2, [program_1];\nld.param.u32 %r1, [program_2];\n\
         mov.u32 %r2, %tid.x;\nmov.u32 %r3, %ctaid.x;\nmul.wide.u32 %rd3, %r2, 4;\nadd.s64 %rd4, %rd1, %rd3;\n\
         add.s64 %rd5, %rd2, %rd3;\nmov.u32 %r4, memory;\nshl.b32 %r5, %r2, 2;\nadd.s32 %r6, %r4, %r5;\n\
         {body}\nret;\n}}\n"
    );
    Module::parse(&text).unwrap_or_else(|fault| panic!("{fault}: {text}"))
}

/// Runs a program on as many words as there are threads; what it writes, or what it may not do.
fn run(body: &str, blocks: u32, threads: u32, given: &[u32], seed: u64) -> Result<Vec<u32>, String> {
    let module = kernel(body);
    let mut memory = Memory::new();
    let input: Vec<u8> = given.iter().flat_map(|word| word.to_le_bytes()).collect();
    let from = memory.allocate("the input", input.len());
    memory.fill(from, &input).unwrap();
    let to = memory.allocate("the output", input.len());
    let mut arguments = [from, to].map(u64::to_le_bytes).concat();
    arguments.extend((given.len() as u32).to_le_bytes());
    let launch = Launch { grid: [blocks, 1, 1], threads, shared: 8192, arguments, seed };
    module.run(&launch, &mut memory).map_err(|fault| fault.to_string())?;
    let bytes = memory.bytes(to, input.len()).map_err(|fault| fault.to_string())?;
    Ok(bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect())
}

/// What is refused, for some seed of a few.
fn refused(body: &str, threads: u32, expected: &str) {
    let outcomes = (0..20).map(|seed| run(body, 1, threads, &vec![1; threads as usize], seed));
    let faults: Vec<String> = outcomes.filter_map(Result::err).collect();
    assert!(faults.iter().any(|fault| fault.contains(expected)), "{expected:?}: {faults:?}");
}

fn numbers(count: u32) -> Vec<u32> {
    (0..count).map(|at| at.wrapping_mul(2_654_435_761) ^ at << 7).collect()
}

/// A function of two words, as PTX and as Rust has it.
#[track_caller]
fn same(instruction: &str, expected: impl Fn(u32) -> u32) {
    let given = numbers(64);
    let body = format!("ld.global.u32 %r10, [%rd4];\n{instruction}\nst.global.u32 [%rd5], %r20;");
    let got = run(&body, 1, 64, &given, 1).unwrap();
    assert_eq!(got, given.iter().map(|&word| expected(word)).collect::<Vec<_>>(), "{instruction}");
}

#[test]
fn functions_are_what_the_instructions_are() {
    same("add.s32 %r20, %r10, -3;", |x| x.wrapping_sub(3));
    same("mad.lo.s32 %r20, %r10, 7, %r10;", |x| x.wrapping_mul(8));
    same("mul.hi.u32 %r20, %r10, 1431655766;", |x| ((u64::from(x) * 1_431_655_766) >> 32) as u32);
    same("mul.hi.s32 %r20, %r10, 1431655766;", |x| ((i64::from(x as i32) * 1_431_655_766) >> 32) as u32);
    same("div.s32 %r20, %r10, -7;", |x| (x as i32 / -7) as u32);
    same("rem.u32 %r20, %r10, 13;", |x| x % 13);
    same("min.s32 %r20, %r10, 5;", |x| (x as i32).min(5) as u32);
    same("max.u32 %r20, %r10, 5;", |x| x.max(5));
    same("shl.b32 %r20, %r10, 32;", |_| 0);
    same("shr.s32 %r20, %r10, 40;", |x| (x as i32 >> 31) as u32);
    same("shr.u32 %r20, %r10, 5;", |x| x >> 5);
    same("clz.b32 %r20, %r10;", u32::leading_zeros);
    same("popc.b32 %r20, %r10;", u32::count_ones);
    same("bfi.b32 %r20, %r10, 0, 8, 4;", |x| (x & 0xf) << 8);
    same("prmt.b32 %r20, %r10, %r10, 0x0123;", u32::swap_bytes);
    same("prmt.b32 %r20, %r10, 0, 0x8880;", |x| {
        let sign = if x & 0x80 == 0 { 0 } else { 0xffff_ff00 };
        sign | x & 0xff
    });
    same("max.u16x2 %r20, %r10, 0x00050005;", |x| (x >> 16).max(5) << 16 | (x & 0xffff).max(5));
    same("setp.lt.s32 %p1, %r10, 0;\nselp.b32 %r20, 1, 2, %p1;", |x| if (x as i32) < 0 { 1 } else { 2 });
    same("mov.b32 {%h1, %h2}, %r10;\nmov.b32 %r20, {%h2, %h1};", |x| x.rotate_left(16));
    same("cvt.rn.f32.s32 %f1, %r10;\nmov.b32 %r20, %f1;", |x| (x as i32 as f32).to_bits());
    same(
        "cvt.rn.f32.s32 %f1, %r10;\nfma.rn.f32 %f2, %f1, 0f3F000000, 0f3F800000;\nmov.b32 %r20, %f2;",
        |x| (x as i32 as f32).mul_add(0.5, 1.0).to_bits(),
    );
    same("cvt.rn.f32.s32 %f1, %r10;\ncvt.rna.tf32.f32 %r20, %f1;", |x| {
        (x as i32 as f32).to_bits().wrapping_add(0x1000) & 0xffff_e000
    });
    same(
        "mov.b32 %f1, 0f7FC00000;\nmov.b32 %f2, 0f40000000;\nmax.f32 %f3, %f1, %f2;\nmov.b32 %r20, %f3;",
        |_| 2f32.to_bits(),
    );
    same("mov.b32 %f1, 0f7FC00000;\nmax.NaN.f32 %f3, %f1, %f1;\nmov.b32 %r20, %f3;", |_| f32::NAN.to_bits());
    same("cvt.rn.f32.u32 %f1, %r10;\nsqrt.rn.f32 %f2, %f1;\nmov.b32 %r20, %f2;", |x| {
        (x as f32).sqrt().to_bits()
    });
    same("mov.f32 %f1, 0f7FC00000;\nsetp.leu.f32 %p1, %f1, %f1;\nselp.u32 %r20, 1, 0, %p1;", |_| 1);
}

/// Lanes that part and meet again; loops of another length for each.
#[test]
fn lanes_go_their_own_ways() {
    let body = "mov.u32 %r10, 0;\nmov.u32 %r11, %r2;\nloop:\nsetp.eq.s32 %p1, %r11, 0;\n@%p1 bra done;\n\
                add.s32 %r10, %r10, %r11;\nadd.s32 %r11, %r11, -1;\nbra.uni loop;\ndone:\n\
                bar.warp.sync -1;\nshfl.sync.bfly.b32 %r12|%p2, %r10, 1, 31, -1;\nst.global.u32 [%rd5], %r12;";
    let got = run(body, 1, 32, &[0; 32], 3).unwrap();
    let sum = |lane: u32| lane * (lane + 1) / 2;
    assert_eq!(got, (0..32).map(|lane| sum(lane ^ 1)).collect::<Vec<_>>());
}

/// Each word from a warp to the next: right with a barrier, and wrong for some order without.
#[test]
fn barriers_are_needed() {
    let body = |barrier: &str| {
        format!(
            "ld.global.u32 %r10, [%rd4];\nst.shared.u32 [%r6], %r10;\n{barrier}\nxor.b32 %r11, %r5, 128;\n\
             add.s32 %r11, %r11, %r4;\nld.shared.u32 %r12, [%r11];\nst.global.u32 [%rd5], %r12;"
        )
    };
    let given = numbers(64);
    let expected: Vec<u32> = (0..64).map(|at| given[at ^ 32]).collect();
    for seed in 0..20 {
        assert_eq!(run(&body("bar.sync 0;"), 1, 64, &given, seed).unwrap(), expected);
    }
    assert!((0..20).any(|seed| run(&body(""), 1, 64, &given, seed).unwrap() != expected));
    refused(
        "setp.lt.u32 %p1, %r2, 32;\n@%p1 bra on;\nbar.sync 1, 64;\non:\nst.global.u32 [%rd5], %r2;",
        64,
        "wait",
    );
}

/// Pairs of warps that vote at barriers of their own: what one pair says the other does not hear.
#[test]
fn some_warps_vote() {
    let body = "shr.u32 %r10, %r2, 6;\nsetp.eq.u32 %p1, %r2, 70;\n\
                bar.red.or.pred %p2, %r10, 64, %p1;\nselp.b32 %r11, 1, 0, %p2;\nst.global.u32 [%rd5], %r11;";
    for seed in 0..20 {
        let got = run(body, 1, 128, &[0; 128], seed).unwrap();
        assert_eq!(got, (0..128).map(|at| u32::from(at >= 64)).collect::<Vec<_>>());
    }
}

/// A copy that is not waited for comes late.
#[test]
fn copies_are_waited_for() {
    let copy = "cp.async.ca.shared.global [%r6], [%rd4], 4, 4;\ncp.async.commit_group;";
    let rest = "ld.shared.u32 %r12, [%r6];\nst.global.u32 [%rd5], %r12;";
    let given = numbers(32);
    assert_eq!(run(&format!("{copy}\ncp.async.wait_group 0;\n{rest}"), 1, 32, &given, 1).unwrap(), given);
    assert_ne!(run(&format!("{copy}\ncp.async.wait_group 1;\n{rest}"), 1, 32, &given, 1).unwrap(), given);
}

/// A bulk copy in, through a barrier that counts its bytes, and one out.
#[test]
fn bulk_copies_need_barriers_and_fences() {
    let body = |wait: &str, fence: &str, read: &str| {
        format!(
            "add.s32 %r7, %r4, 4096;\nsetp.ne.u32 %p1, %r2, 0;\n@%p1 bra begun;\nmbarrier.init.shared::cta.b64 [%r7], 1;\n\
             mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 128;\n\
             cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], 128, [%r7];\nbegun:\n\
             bar.sync 0;\n{wait}\nld.shared.u32 %r10, [%r6];\nadd.s32 %r10, %r10, 1;\nst.shared.u32 [%r6+1024], %r10;\n{fence}\n\
             bar.sync 0;\n@%p1 bra ended;\ncp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r4+1024], 128;\n\
             cp.async.bulk.commit_group;\n{read}\nended:\n"
        )
    };
    let wait = "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%r7], 0;\n@done bra reached;\n\
                bra again;\nreached:\n}";
    let [fence, read] = ["fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"];
    let given = numbers(32);
    for seed in 0..10 {
        let got = run(&body(wait, fence, read), 1, 32, &given, seed).unwrap();
        assert_eq!(got, given.iter().map(|word| word.wrapping_add(1)).collect::<Vec<_>>());
    }
    // The thread that copies may fence in the place of those that wrote, once they have met.
    let late =
        |fence: &str| body(wait, "", read).replace("@%p1 bra ended;", &format!("@%p1 bra ended;\n{fence}"));
    run(&late(fence), 1, 32, &given, 1).unwrap();
    refused(&late(""), 32, "without a fence");
    let without_wait = (0..10).map(|seed| run(&body("", fence, read), 1, 32, &given, seed).unwrap());
    assert!(without_wait.into_iter().any(|got| got[0] != given[0].wrapping_add(1)));
    refused(&body(wait, "", read), 32, "without a fence");
    refused(&body(wait, fence, ""), 32, "before its copies have read");
    refused(
        &body(&wait.replace("[%r7], 0", "[%r7], 1").replace("@done bra reached;\n", ""), fence, read),
        32,
        "wait",
    );
}

/// Whether a barrier's phase is over can be asked without waiting for it.
#[test]
fn barriers_are_asked() {
    let ask = |to: &str, is: u32| {
        format!(
            "mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r7], 0;\nselp.u32 {to}, {is}, 0, %p2;\nbar.sync 0;\n"
        )
    };
    let [before, after] = [ask("%r10", 1), ask("%r11", 2)];
    let body = format!(
        "add.s32 %r7, %r4, 4096;\nsetp.ne.u32 %p1, %r2, 0;\n@%p1 bra begun;\nmbarrier.init.shared::cta.b64 [%r7], 1;\nbegun:\n\
         bar.sync 0;\n{before}@%p1 bra arrived;\nmbarrier.arrive.shared::cta.b64 _, [%r7];\narrived:\nbar.sync 0;\n{after}\
         add.s32 %r10, %r10, %r11;\nst.global.u32 [%rd5], %r10;"
    );
    assert_eq!(run(&body, 1, 32, &numbers(32), 1).unwrap(), [2; 32]);
}

/// Blocks of a cluster bring a word to the next one of it, and arrive at its barrier.
#[test]
fn blocks_of_a_cluster_meet() {
    let meets = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n";
    let passes = |before: &str, wait: &str, after: &str| {
        format!(
            ".reqnctapercluster 4, 1, 1\n\
             setp.eq.u32 %p1, %r2, 0;\nmov.u32 %r20, memory;\nadd.u32 %r20, %r20, 4096;\n\
             @%p1 mbarrier.init.shared::cta.b64 [%r20], 32;\n{before}\
             mad.lo.u32 %r7, %r3, 32, %r2;\nmul.wide.u32 %rd6, %r7, 4;\nadd.s64 %rd7, %rd1, %rd6;\n\
             add.s64 %rd8, %rd2, %rd6;\nld.global.u32 %r10, [%rd7];\nmov.u32 %r11, %cluster_ctarank;\n\
             add.u32 %r12, %r11, 1;\nand.b32 %r12, %r12, 3;\nmapa.shared::cluster.u32 %r13, %r6, %r12;\n\
             mapa.shared::cluster.u32 %r14, %r20, %r12;\nst.shared::cluster.u32 [%r13], %r10;\n\
             mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14];\n{wait}\
             ld.shared.u32 %r15, [%r6];\nst.global.u32 [%rd8], %r15;\n{after}"
        )
    };
    let wait = "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r20], 0;\n@!%p2 bra again;\n";
    let given = numbers(256);
    let expected: Vec<u32> =
        (0..256).map(|at| given[at / 128 * 128 + (at / 32 + 3) % 4 * 32 + at % 32]).collect();
    // Without waiting for others to begin, for what they bring, and for them before one ends.
    let programs = [passes("", wait, meets), passes(meets, "", meets), passes(meets, "", "")];
    let mut found = programs.map(|program| (program, 0, 0));
    for seed in 0..20 {
        assert_eq!(run(&passes(meets, wait, meets), 8, 32, &given, seed).unwrap(), expected);
        for (program, faults, wrong) in &mut found {
            match run(program, 8, 32, &given, seed) {
                Ok(got) => *wrong += i32::from(got != expected),
                Err(fault) => *faults += i32::from(fault.contains("may not have begun, or has ended")),
            }
        }
    }
    let [(_, early, _), (_, _, wrong), (_, late, _)] = found;
    assert!(early == 20 && wrong > 0 && late > 0, "{early} {wrong} {late}");
    assert!(run(&passes(meets, wait, meets), 6, 32, &given, 0).unwrap_err().contains("in clusters of 4"));
    refused("mapa.shared::cluster.u32 %r13, %r6, %r1;", 32, "block 32 of 1");
    refused("barrier.cluster.wait.acquire.aligned;", 32, "without having come");
}

#[test]
fn memory_is_checked() {
    let st = "st.global.u32 [%rd5], %r2;";
    refused("ld.global.u32 %r10, [%rd4+4];", 32, "bytes 128 to 132 of the input, which has 128");
    refused("ld.global.v2.u32 {%r10, %r11}, [%rd4+4];", 32, "not aligned to 8");
    refused("ld.global.u32 %r10, [%rd5];", 32, "byte 0 of the output was never written");
    refused(
        "setp.ne.u32 %p1, %r2, 5;\n@%p1 st.global.u32 [%rd5], %r2;",
        32,
        "byte 20 of the output was never written",
    );
    refused("ld.shared.u32 %r10, [%r6+8192];", 32, "of shared memory, of 8192");
    refused("st.shared.v2.u32 [%r6], {%r2, %r2};", 32, "not aligned to 8");
    refused("mov.u64 %rd6, 64;\nld.global.u32 %r10, [%rd6];", 32, "nowhere");
    let blocks = run(st, 2, 32, &[1; 32], 1).unwrap_err();
    assert!(blocks.contains("byte 0 of the output is written by two blocks"), "{blocks}");
}

#[test]
fn what_is_not_known_is_named() {
    let error = |text: &str| Module::parse(text).unwrap_err().to_string();
    assert_eq!(error(""), "no kernel");
    let of = |body: &str| {
        error(&format!(".visible .entry a(.param .u32 a_0)\n{{\n.reg .b32 %r<3>;\n{body}\nret;\n}}\n"))
    };
    assert_eq!(of("tex.1d.v4 %r1, %r2;"), "line 4: unknown instruction tex.1d.v4");
    assert_eq!(of("mov.u32 %r1, %r3;"), "line 4: no register %r3");
    assert_eq!(of("mov.u32 %r1, elsewhere;"), "line 4: nothing is called elsewhere");
    assert!(of("bra nowhere;").ends_with("no label nowhere"));
    let arguments = vec![0; 3];
    let module = kernel("");
    let launch = Launch { grid: [1; 3], threads: 32, shared: 0, arguments, seed: 1 };
    let fault = module.run(&launch, &mut Memory::new()).unwrap_err().to_string();
    assert_eq!(fault, "program: 3 bytes of arguments, not 20");
}

/// The matrix instruction of a warp, from `ldmatrix`: 16 rows by 8 columns by 8 of K, of whole numbers that tf32 holds.
#[test]
fn a_warp_multiplies_matrices() {
    // A is 16 rows of 8 words, B 8 columns of 8 words, 16-byte halves of rows side by side.
    let a = |row: usize, k: usize| ((row * 5 + k * 3) % 17) as f32 - 8.0;
    let b = |column: usize, k: usize| ((column * 7 + k) % 13) as f32 - 6.0;
    let mut given: Vec<u32> = Vec::new();
    given.extend((0..16).flat_map(|row| (0..8).map(move |k| a(row, k).to_bits())));
    given.extend((0..8).flat_map(|column| (0..8).map(move |k| b(column, k).to_bits())));
    given.resize(256, 0);
    // Lanes give the addresses of eights of rows: rows of A, then its second eight, each first K 0 to 3, then 4 to 7.
    let body = "setp.ge.u32 %p7, %r2, 32;\nshl.b32 %r30, %r2, 5;\nadd.s32 %r30, %r30, %r4;\n\
                ld.global.v4.u32 {%r31, %r32, %r33, %r34}, [%rd6];\nst.shared.v4.u32 [%r30], {%r31, %r32, %r33, %r34};\n\
                ld.global.v4.u32 {%r31, %r32, %r33, %r34}, [%rd6+16];\nst.shared.v4.u32 [%r30+16], {%r31, %r32, %r33, %r34};\n\
                bar.sync 0;\n\
                and.b32 %r40, %r2, 15;\nshl.b32 %r40, %r40, 5;\nshr.u32 %r41, %r2, 4;\nshl.b32 %r41, %r41, 4;\n\
                add.s32 %r40, %r40, %r41;\nadd.s32 %r40, %r40, %r4;\n\
                ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r50, %r51, %r52, %r53}, [%r40];\n\
                and.b32 %r42, %r2, 7;\nshl.b32 %r42, %r42, 5;\nshr.u32 %r43, %r2, 3;\nand.b32 %r43, %r43, 1;\n\
                shl.b32 %r43, %r43, 4;\nadd.s32 %r42, %r42, %r43;\nadd.s32 %r42, %r42, %r4;\n\
                ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r60, %r61, %r62, %r63}, [%r42+512];\n\
                mov.f32 %f1, 0f3F800000;\n\
                mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f10, %f11, %f12, %f13}, {%r50, %r51, %r52, %r53}, \
                {%r60, %r61}, {%f1, %f1, %f1, %f1};\n\
                mul.wide.u32 %rd7, %r2, 16;\nadd.s64 %rd7, %rd7, %rd2;\nst.global.v4.f32 [%rd7], {%f10, %f11, %f12, %f13};\n\
                add.s64 %rd7, %rd7, 512;\nst.global.v4.f32 [%rd7], {%f1, %f1, %f1, %f1};";
    let body = format!("mul.wide.u32 %rd6, %r2, 32;\nadd.s64 %rd6, %rd6, %rd1;\n{body}");
    let got = run(&body, 1, 32, &given, 1).unwrap();
    for lane in 0..32 {
        for index in 0..4 {
            let (row, column) = (lane / 4 + index / 2 * 8, lane % 4 * 2 + index % 2);
            let sum: f32 = (0..8).map(|k| a(row, k) * b(column, k)).sum();
            assert_eq!(f32::from_bits(got[lane * 4 + index]), sum + 1.0, "row {row}, column {column}");
        }
    }
}

/// Matrices of 8 by 8 elements of 16 bits to shared memory, as they are and turned over.
#[test]
fn a_warp_stores_matrices() {
    // Lane 4*row + column/2 has two neighbours of a row; the second matrix is the first and 64 more.
    let element = |matrix: u32, row: u32, column: u32| 64 * matrix + 8 * row + column;
    for (order, turned) in [("", false), (".trans", true)] {
        let body = format!(
            "shl.b32 %r30, %r2, 1;\nadd.s32 %r31, %r30, 1;\nshl.b32 %r31, %r31, 16;\nor.b32 %r30, %r30, %r31;\n\
             add.s32 %r31, %r30, 4194368;\n\
             shl.b32 %r32, %r2, 4;\nadd.s32 %r32, %r32, %r4;\n\
             stmatrix.sync.aligned.m8n8.x2{order}.shared.b16 [%r32], {{%r30, %r31}};\nbar.sync 0;\n\
             shl.b32 %r33, %r2, 2;\nadd.s32 %r33, %r33, %r4;\n\
             ld.shared.u32 %r34, [%r33];\nld.shared.u32 %r35, [%r33+128];\n\
             st.global.u32 [%rd5], %r34;\nadd.s64 %rd5, %rd5, 128;\nst.global.u32 [%rd5], %r35;"
        );
        let got = run(&body, 1, 32, &[0; 64], 1).unwrap();
        for (word, &both) in (0..64).zip(&got) {
            let (matrix, row, column) = (word / 32, word % 32 / 4, word % 4 * 2);
            for (at, value) in [(column, both & 0xffff), (column + 1, both >> 16)] {
                let [of_row, of_column] = if turned { [at, row] } else { [row, at] };
                assert_eq!(value, element(matrix, of_row, of_column), "row {row}, column {at}{order}");
            }
        }
    }
}

/// What lanes ask for: words in banks, sectors of memory, whole or in part.
#[test]
fn what_is_asked_for_is_counted() {
    let count = |body: &str| {
        let module = kernel(body);
        let mut memory = Memory::new();
        let at = memory.allocate("the output", 8192);
        let mut arguments = [at, at].map(u64::to_le_bytes).concat();
        arguments.extend(0u32.to_le_bytes());
        let launch = Launch { grid: [1; 3], threads: 32, shared: 8192, arguments, seed: 1 };
        module.run(&launch, &mut memory).unwrap();
        memory.counters()
    };
    let none = count("");
    let shared = |body: &str| count(body).shared_wavefronts;
    assert_eq!(shared("st.shared.u32 [%r6], %r2;"), 1);
    assert_eq!(shared("st.shared.u32 [%r4], %r2;"), 1, "all lanes at one word");
    assert_eq!(shared("shl.b32 %r7, %r2, 3;\nadd.s32 %r7, %r7, %r4;\nst.shared.u32 [%r7], %r2;"), 2);
    assert_eq!(shared("shl.b32 %r7, %r2, 7;\nadd.s32 %r7, %r7, %r4;\nst.shared.u32 [%r7], %r2;"), 32);
    let wide = "shl.b32 %r7, %r2, 4;\nadd.s32 %r7, %r7, %r4;\nst.shared.v4.u32 [%r7], {%r2, %r2, %r2, %r2};";
    assert_eq!(shared(wide), 4);
    let stored = |body: &str| {
        let counters = count(body);
        [counters.sectors_written, counters.sectors_written_in_part]
    };
    assert_eq!(stored("st.global.u32 [%rd5], %r2;"), [4, 0]);
    assert_eq!(stored("st.global.u32 [%rd5+4], %r2;"), [5, 2]);
    assert_eq!(stored("add.s64 %rd5, %rd5, %rd3;\nst.global.u32 [%rd5], %r2;"), [8, 8]);
    assert_eq!(count("add.s32 %r7, %r2, 1;").instructions, none.instructions + 1);
}
