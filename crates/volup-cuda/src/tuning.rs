//! Plans that were measured to be faster than those that the model chooses, kept in a file.
//!
//! Nothing needs that file. `volup tune` writes it ([`crate::CudaEngine::tune`]), and every later plan of the same request, on the
//! same kind of device and with the same kernels, is the one that stands there: from Rust, Python and the command line.
//! What was measured with other kernels is passed over. Two plans of a request may differ in the last bits of their
//! results; without the file, or with it, the same call gives the same.
//!
//! A line an entry, of fields that tabs part: device, kernels, request, plan.

use crate::{DeviceInfo, Plan, Request, Task, Variant};
use std::collections::HashMap;
use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};
use volup::testing::Case;
use volup::{DType, Error, Result};

/// The variable that names the file; empty, there is none.
const VARIABLE: &str = "VOLUP_TUNING";
/// What the file is called in the user's folder of caches.
const NAME: &str = "volup/tuning.tsv";

/// Where the file is: what `VOLUP_TUNING` names, else `volup/tuning.tsv` among the user's caches (`XDG_CACHE_HOME`, or
/// `.cache` at home). None where neither is known, or that variable is empty.
pub fn path() -> Option<PathBuf> {
    place(|name| std::env::var_os(name).map(PathBuf::from))
}

fn place(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let given = |path: &PathBuf| !path.as_os_str().is_empty();
    match variable(VARIABLE) {
        Some(path) => Some(path).filter(given),
        None => {
            let caches = variable("XDG_CACHE_HOME").filter(given);
            caches
                .or_else(|| Some(variable("HOME").filter(given)?.join(".cache")))
                .map(|caches| caches.join(NAME))
        }
    }
}

/// The entries of a file that are for one device and its kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    device: String,
    kernels: String,
    /// Plans by requests.
    plans: HashMap<String, String>,
}

impl Tuning {
    /// Reads a file, which need not be there. Lines that are not understood are passed over.
    ///
    /// # Errors
    /// [`Error::Io`] where it is there and cannot be read.
    pub fn read(path: &Path, device: &DeviceInfo, variants: &[&Variant]) -> Result<Tuning> {
        let mut tuning = Tuning { device: named(device), kernels: known_by(variants), plans: HashMap::new() };
        for line in lines(path)? {
            if let [device, kernels, request, plan] = line.split('\t').collect::<Vec<_>>()[..]
                && (device, kernels) == (&tuning.device, &tuning.kernels)
            {
                tuning.plans.insert(request.into(), plan.into());
            }
        }
        Ok(tuning)
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// The plan of a request, as it is printed.
    pub fn get(&self, request: &Request) -> Option<&str> {
        self.plans.get(&key(request)?).map(String::as_str)
    }

    /// Sets the plan of a request, or none, and writes the file: whole, or not at all. Other devices' entries stay; those of
    /// this one that are of other kernels go.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be read or written.
    pub fn record(&mut self, path: &Path, request: &Request, plan: Option<&str>) -> Result<()> {
        let Some(key) = key(request) else { return Ok(()) };
        match plan {
            Some(plan) => self.plans.insert(key, plan.into()),
            None => self.plans.remove(&key),
        };
        let mut all: Vec<String> =
            lines(path)?.into_iter().filter(|line| line.split('\t').next() != Some(&self.device)).collect();
        let (device, kernels) = (&self.device, &self.kernels);
        all.extend(
            self.plans.iter().map(|(request, plan)| format!("{device}\t{kernels}\t{request}\t{plan}")),
        );
        all.sort_unstable();
        let fresh = path.with_extension(format!("{}.part", std::process::id()));
        let write = || {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            std::fs::write(&fresh, all.iter().map(|line| format!("{line}\n")).collect::<String>())?;
            std::fs::rename(&fresh, path)
        };
        write().map_err(|source| {
            // What is half written is of no use.
            let _ = std::fs::remove_file(&fresh);
            failed(path, source)
        })
    }

    /// The plan of a request that stands here, or the model's.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan(&self, request: &Request, device: &DeviceInfo, variants: &[&Variant]) -> Result<Plan> {
        if let Some(text) = self.get(request) {
            let plans = Plan::candidates(request, device, variants, usize::MAX)?;
            if let Some(plan) = plans.into_iter().find(|plan| plan.to_string() == text) {
                return Ok(plan);
            }
        }
        Plan::new(request, device, variants)
    }
}

/// A file's lines; none if it is not there.
fn lines(path: &Path) -> Result<Vec<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.lines().map(str::to_string).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(failed(path, source)),
    }
}

fn failed(path: &Path, source: IoError) -> Error {
    Error::Io { path: path.into(), source }
}

/// What a kind of device is known by.
fn named(device: &DeviceInfo) -> String {
    format!("{}, {}, {} multiprocessors", device.name, device.arch, device.multiprocessors)
}

/// What a build's kernels are known by (FNV-1a of their hashes, names and sizes).
fn known_by(variants: &[&Variant]) -> String {
    let text = |variant: &&Variant| format!("{}\n{}\n{:?}\n", variant.name, variant.hash, variant.params);
    let bytes = variants.iter().flat_map(|variant| text(variant).into_bytes());
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

/// What a request is known by: a forward pass that leaves the family to the plan.
fn key(request: &Request) -> Option<String> {
    let &Request { task, block, geometry, dtype, precision, input_format, output_format, algorithm } =
        request;
    if task != Task::Forward || algorithm.is_some() {
        return None;
    }
    let [_, _, input @ ..] = geometry.input_shape();
    let case = Case { name: "", why: "", block, batch: Some(geometry.batch()), input, format: input_format };
    let line = case.to_string();
    let spec = line.strip_prefix(": ").unwrap_or(&line);
    let numbers = if dtype == DType::F32 { format!("{dtype} {precision}") } else { dtype.to_string() };
    Some(format!("{spec} -> {output_format}; {numbers}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{hopper_kernels, request_of};
    use std::ffi::OsStr;

    const LINE: &str = "n 2, 8x8x8, 16>24, k 3, s 2, p 1, bias, relu";

    fn file(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("volup-tuning-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder.join("cache/tuning.tsv")
    }

    #[test]
    fn the_file_is_where_the_user_says_or_among_the_caches() {
        let of = |given: &[(&str, &str)]| {
            let known: HashMap<&str, &str> = given.iter().copied().collect();
            place(|name| known.get(name).map(PathBuf::from))
        };
        assert_eq!(of(&[("HOME", "/home/a")]), Some("/home/a/.cache/volup/tuning.tsv".into()));
        let caches = [("HOME", "/home/a"), ("XDG_CACHE_HOME", "/var/b")];
        assert_eq!(of(&caches), Some("/var/b/volup/tuning.tsv".into()));
        assert_eq!(of(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "")]), of(&[("HOME", "/home/a")]));
        assert_eq!(of(&[("VOLUP_TUNING", "x.tsv"), ("HOME", "/home/a")]), Some("x.tsv".into()));
        assert_eq!(of(&[("VOLUP_TUNING", ""), ("HOME", "/home/a")]), None);
        assert_eq!(of(&[]), None);
    }

    /// Another plan than the model's is the plan from then on, of that request alone, until it is taken back.
    #[test]
    fn what_was_recorded_is_planned() {
        let (device, variants) = hopper_kernels();
        let variants: Vec<&Variant> = variants.iter().collect();
        let path = file("recorded");
        let request = request_of(LINE);
        let plans = Plan::candidates(&request, &device, &variants, 5).unwrap();
        let (first, other) = (&plans[0], plans[4].to_string());
        let mut tuning = Tuning::read(&path, &device, &variants).unwrap();
        assert!(tuning.is_empty() && tuning.plan(&request, &device, &variants).unwrap() == *first);
        tuning.record(&path, &request, Some(&other)).unwrap();

        let again = Tuning::read(&path, &device, &variants).unwrap();
        assert_eq!((again.len(), again.get(&request)), (1, Some(other.as_str())));
        assert_eq!(again.plan(&request, &device, &variants).unwrap().to_string(), other);
        let asked = |change: fn(&mut Request)| {
            let mut request = request;
            change(&mut request);
            again.get(&request).map(str::to_string)
        };
        assert_eq!(asked(|request| request.precision = volup::Precision::Ieee), None);
        assert_eq!(asked(|request| request.dtype = DType::F16), None);
        assert_eq!(asked(|request| request.task = Task::Training), None);
        assert_eq!(asked(|request| request.algorithm = Some(crate::Algorithm::HaloGemm)), None);
        assert_eq!(asked(|request| request.output_format = volup::MemoryFormat::ChannelsLast3d), None);
        assert_eq!(again.get(&request_of("n 3, 8x8x8, 16>24, k 3, s 2, p 1, bias, relu")), None);

        tuning.record(&path, &request, None).unwrap();
        assert!(Tuning::read(&path, &device, &variants).unwrap().is_empty());
        std::fs::remove_dir_all(path.parent().and_then(Path::parent).unwrap()).unwrap();
    }

    /// Other devices' entries stay, those of other kernels go, and what is no entry is passed over.
    #[test]
    fn entries_are_of_a_device_and_its_kernels() {
        let (device, variants) = hopper_kernels();
        let variants: Vec<&Variant> = variants.iter().collect();
        let larger = DeviceInfo { multiprocessors: 200, ..device.clone() };
        let path = file("devices");
        let request = request_of(LINE);
        let read =
            |device: &DeviceInfo, variants: &[&Variant]| Tuning::read(&path, device, variants).unwrap();
        read(&larger, &variants).record(&path, &request, Some("one")).unwrap();
        read(&device, &variants[1..]).record(&path, &request, Some("two")).unwrap();
        assert!(read(&device, &variants).is_empty());
        // A plan that there is none of is the model's.
        read(&device, &variants).record(&path, &request, Some("three")).unwrap();
        let expected = Plan::new(&request, &device, &variants).unwrap();
        assert_eq!(read(&device, &variants).plan(&request, &device, &variants).unwrap(), expected);
        assert_eq!(read(&larger, &variants).get(&request), Some("one"));
        assert!(read(&device, &variants[1..]).is_empty());

        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("no entry\n{text}\ta\tb\n")).unwrap();
        assert_eq!(read(&device, &variants).get(&request), Some("three"));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left behind");
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(Tuning::read(&path, &device, &variants).is_err());
        assert!(Tuning::default().record(Path::new("/dev/null/no/file"), &request, Some("x")).is_err());
        assert_eq!(path.extension(), Some(OsStr::new("tsv")));
        std::fs::remove_dir_all(path.parent().and_then(Path::parent).unwrap()).unwrap();
    }
}
