//! The file `manifest.json` that the kernels' build writes: which cubins there are. Read when this
//! crate is built, by its build script.

use serde_json::Value;

/// The file's contents.
#[derive(Debug)]
pub struct Listing {
    /// The compiler and its version.
    pub compiler: String,
    /// One kernel each.
    pub variants: Vec<Listed>,
}

/// One kernel of the file.
#[derive(Debug)]
pub struct Listed {
    /// Its name, unique in its architecture.
    pub name: String,
    /// The family it belongs to.
    pub family: String,
    /// The function's name in the cubin.
    pub entry: String,
    /// Major and minor version of the architecture.
    pub arch: (u64, u64),
    /// The cubin, relative to the manifest.
    pub file: String,
    /// The types it was compiled for.
    pub types: Vec<String>,
    /// Its compile-time sizes by name.
    pub params: Vec<(String, i64)>,
    /// Registers a thread.
    pub registers: u64,
    /// Bytes of local memory a thread.
    pub local_bytes: u64,
    /// Bytes of shared memory a block.
    pub shared_bytes: u64,
    /// Threads of a block as the launch counts them: 1 where they are part of the code.
    pub threads: u64,
    /// Whether it runs on its architecture alone.
    pub exact: bool,
    /// The hash of everything that it was made from.
    pub hash: String,
}

/// Reads the file's text; an error names the field that is wrong.
pub fn parse(text: &str) -> Result<Listing, String> {
    let root: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let root = Object { path: String::new(), value: &root };
    let compiler = root.text("compiler")?;
    let mut variants: Vec<Listed> = Vec::new();
    for (index, value) in root.array("variants")?.iter().enumerate() {
        let variant = listed(&Object { path: format!("variants[{index}]."), value })?;
        if variants.iter().any(|other| (&other.name, other.arch) == (&variant.name, variant.arch)) {
            return Err(format!("variants[{index}].name must be unique in its arch, got {:?}", variant.name));
        }
        variants.push(variant);
    }
    Ok(Listing { compiler, variants })
}

fn listed(object: &Object<'_>) -> Result<Listed, String> {
    let file = object.text("file")?;
    if file.starts_with('/') || file.split('/').any(|part| part == "..") {
        return Err(object.wrong("file", "a path inside the manifest's folder"));
    }
    let types = object.array("types")?.iter().map(|value| value.as_str().map(str::to_string));
    let types = types.collect::<Option<_>>().ok_or_else(|| object.wrong("types", "a list of strings"))?;
    let expected = "an object of whole numbers";
    let params = object.get("params")?.as_object().ok_or_else(|| object.wrong("params", expected))?;
    let params = params.iter().map(|(name, value)| Some((name.clone(), value.as_i64()?)));
    Ok(Listed {
        name: object.text("name")?,
        family: object.text("family")?,
        entry: object.text("entry")?,
        arch: arch(&object.text("arch")?).ok_or_else(|| object.wrong("arch", "as in sm_90"))?,
        file,
        types,
        params: params.collect::<Option<_>>().ok_or_else(|| object.wrong("params", expected))?,
        registers: object.count("registers")?,
        local_bytes: object.count("local_bytes")?,
        shared_bytes: object.count("shared_bytes")?,
        threads: if object.has("threads") { object.count("threads")? } else { 1 },
        exact: object.has("exact") && object.truth("exact")?,
        hash: object.text("hash")?,
    })
}

/// Major and minor version of `sm_90`, `sm_120`.
fn arch(name: &str) -> Option<(u64, u64)> {
    let digits =
        name.strip_prefix("sm_").filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    let (major, minor) = digits.split_at_checked(digits.len().checked_sub(1)?)?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// An object and where it is in the file.
struct Object<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Object<'a> {
    fn get(&self, field: &str) -> Result<&'a Value, String> {
        self.value.get(field).ok_or_else(|| format!("{}{field} is missing", self.path))
    }

    fn has(&self, field: &str) -> bool {
        self.value.get(field).is_some()
    }

    fn wrong(&self, field: &str, expected: &str) -> String {
        let got = self.value.get(field).unwrap_or(&Value::Null);
        format!("{}{field} must be {expected}, got {got}", self.path)
    }

    fn text(&self, field: &str) -> Result<String, String> {
        let text = self.get(field)?.as_str().filter(|text| !text.is_empty());
        Ok(text.ok_or_else(|| self.wrong(field, "a string that is not empty"))?.into())
    }

    fn count(&self, field: &str) -> Result<u64, String> {
        let count = self.get(field)?.as_u64().filter(|&count| count <= u64::from(u32::MAX));
        count.ok_or_else(|| self.wrong(field, "a whole number of 32 bits"))
    }

    fn truth(&self, field: &str) -> Result<bool, String> {
        self.get(field)?.as_bool().ok_or_else(|| self.wrong(field, "true or false"))
    }

    fn array(&self, field: &str) -> Result<&'a [Value], String> {
        Ok(self.get(field)?.as_array().ok_or_else(|| self.wrong(field, "a list"))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn variant() -> Value {
        json!({
            "name": "linear_gemm_bf16_128x128x64", "family": "linear_gemm", "entry": "linear_gemm_entry",
            "arch": "sm_90", "file": "sm_90/linear_gemm_bf16_128x128x64.cubin", "types": ["bf16"],
            "params": {"BM": 128, "BN": 128, "BK": 64}, "registers": 168, "local_bytes": 0,
            "shared_bytes": 100_000, "hash": "0af3",
        })
    }

    fn parsed(variants: &[Value]) -> Result<Listing, String> {
        parse(&json!({"compiler": "tileiras 13.5.37", "variants": variants}).to_string())
    }

    #[test]
    fn a_manifest_is_read() {
        let mut other = variant();
        for (field, value) in [("arch", json!("sm_120")), ("threads", json!(288)), ("exact", json!(true))] {
            other[field] = value;
        }
        let listing = parsed(&[variant(), other]).unwrap();
        assert_eq!(listing.compiler, "tileiras 13.5.37");
        assert_eq!(listing.variants.iter().map(|v| v.arch).collect::<Vec<_>>(), [(9, 0), (12, 0)]);
        let launched: Vec<_> = listing.variants.iter().map(|v| (v.threads, v.exact)).collect();
        assert_eq!(launched, [(1, false), (288, true)]);
        let first = &listing.variants[0];
        assert_eq!(
            (first.name.as_str(), first.family.as_str()),
            ("linear_gemm_bf16_128x128x64", "linear_gemm")
        );
        assert_eq!((first.entry.as_str(), first.hash.as_str()), ("linear_gemm_entry", "0af3"));
        assert_eq!(first.file, "sm_90/linear_gemm_bf16_128x128x64.cubin");
        assert_eq!(first.types, ["bf16"]);
        assert!(first.params.contains(&("BN".into(), 128)) && first.params.len() == 3);
        assert_eq!((first.registers, first.local_bytes, first.shared_bytes), (168, 0, 100_000));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (field, wrong, expected) in [
            ("name", json!(""), "variants[0].name must be a string that is not empty, got \"\""),
            ("entry", json!(7), "variants[0].entry must be a string that is not empty, got 7"),
            ("arch", json!("sm_90a"), "variants[0].arch must be as in sm_90, got \"sm_90a\""),
            ("arch", json!("90"), "variants[0].arch must be as in sm_90, got \"90\""),
            ("arch", json!("sm_"), "variants[0].arch must be as in sm_90, got \"sm_\""),
            ("arch", json!("sm_9"), "variants[0].arch must be as in sm_90, got \"sm_9\""),
            (
                "file",
                json!("../x"),
                "variants[0].file must be a path inside the manifest's folder, got \"../x\"",
            ),
            ("file", json!("/x"), "variants[0].file must be a path inside the manifest's folder, got \"/x\""),
            ("types", json!([1]), "variants[0].types must be a list of strings, got [1]"),
            (
                "params",
                json!({"BM": 0.5}),
                "variants[0].params must be an object of whole numbers, got {\"BM\":0.5}",
            ),
            ("threads", json!("288"), "variants[0].threads must be a whole number of 32 bits, got \"288\""),
            ("exact", json!(1), "variants[0].exact must be true or false, got 1"),
            ("registers", json!(-1), "variants[0].registers must be a whole number of 32 bits, got -1"),
            ("local_bytes", json!(1u64 << 32), "variants[0].local_bytes must be a whole number of 32 bits"),
        ] {
            let mut variant = variant();
            variant[field] = wrong;
            let error = parsed(&[variant]).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        for field in variant().as_object().unwrap().keys() {
            let mut variant = variant();
            variant.as_object_mut().unwrap().remove(field);
            assert_eq!(parsed(&[variant]).unwrap_err(), format!("variants[0].{field} is missing"));
        }
        let twice = parsed(&[variant(), variant()]).unwrap_err();
        assert!(twice.starts_with("variants[1].name must be unique in its arch"), "{twice}");
        assert_eq!(parse("{\"compiler\": \"x\"}").unwrap_err(), "variants is missing");
        assert_eq!(parse("[]").unwrap_err(), "compiler is missing");
        assert!(parse("{").unwrap_err().contains("line 1"));
    }
}
