use super::*;
use proptest::prelude::*;

fn conv() -> ConvSpecBuilder {
    ConvSpec::builder(4, 6, 3)
}

#[test]
fn sizes_follow_pytorchs_formula() {
    let spec = conv().stride([2, 3, 1]).padding(1).output_padding([1, 2, 0]).build().unwrap();
    let geometry = spec.geometry(2, [5, 6, 7]).unwrap();
    assert_eq!(geometry.output_shape(), [2, 6, 10, 18, 7]);
    assert_eq!(geometry.input_shape(), [2, 4, 5, 6, 7]);
    assert_eq!(spec.to_string(), "4>6, k 3x3x3, s 2x3x1, p 1x1x1, op 1x2x0");
}

#[test]
fn each_rule_has_its_error() {
    use Error as E;
    assert!(matches!(conv().stride([1, 0, 1]).build(), Err(E::NotPositive { param: "stride", got: 0 })));
    assert!(matches!(conv().dilation(-2).build(), Err(E::NotPositive { param: "dilation", got: -2 })));
    assert!(matches!(conv().padding([0, 0, -1]).build(), Err(E::Negative { param: "padding", got: -1 })));
    assert!(matches!(
        conv().output_padding(-1).build(),
        Err(E::Negative { param: "output_padding", got: -1 })
    ));
    assert!(matches!(
        conv().stride(2).dilation(3).output_padding([2, 3, 0]).build(),
        Err(E::OutputPadding { axis: "height", got: 3, stride: 2, dilation: 3 })
    ));
    assert!(matches!(ConvSpec::builder(1, 1, 0).build(), Err(E::NotPositive { param: "kernel_size", .. })));
    assert!(matches!(ConvSpec::builder(0, 1, 1).build(), Err(E::NotPositive { param: "in_channels", .. })));
    assert!(matches!(conv().groups(0).build(), Err(E::NotPositive { param: "groups", .. })));
    assert!(matches!(
        conv().groups(3).build(),
        Err(E::Indivisible { param: "in_channels", got: 4, divisor: 3, .. })
    ));
    assert!(matches!(conv().groups(4).build(), Err(E::Indivisible { param: "out_channels", got: 6, .. })));
    assert!(matches!(Triple::from_slice("stride", &[1, 2]), Err(E::Arity { param: "stride", got: 2 })));
    assert!(matches!(ConvSpec::builder(1 << 40, 1 << 40, 1).build(), Err(E::Overflow { .. })));
    let spec = conv().padding(4).build().unwrap();
    assert!(matches!(spec.geometry(1, [9, 6, 9]), Err(E::OutputTooSmall { axis: "height", got: 0 })));
    assert!(matches!(spec.geometry(1, [9, 9, 0]), Err(E::EmptyInput { axis: "width" })));
    assert!(matches!(conv().build().unwrap().geometry(1, [usize::MAX, 1, 1]), Err(E::Overflow { .. })));
    assert!(matches!(
        conv().stride(usize::MAX).build().unwrap().geometry(1, [9; 3]),
        Err(E::Overflow { .. })
    ));
}

#[test]
fn messages_name_parameter_got_and_expected() {
    let message = conv().output_padding(1).build().unwrap_err().to_string();
    assert_eq!(
        message,
        "output_padding must be smaller than either stride or dilation, got output_padding 1 with stride 1 \
         and dilation 1 along depth"
    );
}

/// A random valid axis: its parameters are drawn so that every rule holds.
pub(crate) fn any_axis() -> impl Strategy<Value = Axis> {
    (1usize..12, 1usize..8, 1usize..7, 1usize..7, 0usize..7, 0usize..64).prop_map(|(i, k, s, d, op, p)| {
        let op = op % s.max(d);
        let full = (i - 1) * s + d * (k - 1) + op + 1;
        let p = p % full.div_ceil(2);
        let conv = ConvSpec::builder(1, 1, k).stride(s).padding(p).dilation(d).output_padding(op).build();
        conv.unwrap().geometry(1, [i; 3]).unwrap().axes()[0]
    })
}

/// The (input, tap) pairs that reach output `o`, by the definition.
pub(crate) fn pairs_of(axis: &Axis, o: usize) -> Vec<(usize, usize)> {
    let all = (0..axis.input).flat_map(|i| (0..axis.kernel).map(move |t| (i, t)));
    all.filter(|&(i, t)| i * axis.stride + t * axis.dilation == o + axis.padding).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// The closed form for `pairs` against counting.
    #[test]
    fn pairs_are_counted(axis in any_axis()) {
        let counted: usize = (0..axis.output).map(|o| pairs_of(&axis, o).len()).sum();
        prop_assert_eq!(axis.pairs(), counted as u64);
    }
}
