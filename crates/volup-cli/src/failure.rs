//! How a failure reads on the terminal.

use std::io::ErrorKind;

/// An error and what it is about, on one line. volup's own errors already say what caused them.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&cause.to_string());
        if cause.is::<volup::Error>() {
            break;
        }
    }
    line.replace(['\n', '\r'], " ")
}

/// Whether the reader of our output has gone, which is nobody's error.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is = |cause: &std::io::Error| cause.kind() == ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(is))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_line() {
        let inner = std::io::Error::other("two\nlines");
        let error = anyhow::Error::from(volup::Error::Io { path: "a.npy".into(), source: inner });
        assert_eq!(one_line(&error.context("outer")), "outer: a.npy: two lines");
    }
}
