//! The options of the policies, as text, with upstream's errors.
//!
//! Upstream: `cpumanager/policy_options.go`, `topologymanager/policy_options.go`.

use std::collections::BTreeMap;

use release::features::{self, Feature};

pub const LARGEST_NUMA_COUNT: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    #[error("unknown CPU Manager Policy option: {0:?}")]
    UnknownCpu(String),
    #[error("CPU Manager Policy {0}-level Options not enabled, but option {1:?} provided")]
    Gated(&'static str, String),
    #[error("bad value for option {0:?}: strconv.ParseBool: parsing {1:?}: invalid syntax")]
    Bool(String, String),
    #[error("static policy options {0} and {1} can not be used at the same time")]
    Both(&'static str, &'static str),
    #[error("unknown Topology Manager Policy option: {0:?}")]
    UnknownTopology(String),
    #[error(
        "unable to convert policy option to integer {0:?}: strconv.Atoi: parsing {1:?}: invalid syntax"
    )]
    Number(String, String),
    #[error("the minimum value of {0:?} should not be less than {LARGEST_NUMA_COUNT}")]
    TooFewNodes(String),
}

const FULL: &str = "full-pcpus-only";
const ACROSS_NUMA: &str = "distribute-cpus-across-numa";
const BY_SOCKET: &str = "align-by-socket";
const ACROSS_CORES: &str = "distribute-cpus-across-cores";
const STRICT: &str = "strict-cpu-reservation";
const UNCORE: &str = "prefer-align-cpus-by-uncorecache";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    pub full_cores: bool,
    pub distribute_across_numa: bool,
    pub align_by_socket: bool,
    pub distribute_across_cores: bool,
    pub strict_reservation: bool,
    pub prefer_uncore_cache: bool,
}

impl CpuOptions {
    pub fn parse(options: &BTreeMap<String, String>) -> Result<Self, OptionError> {
        let mut out = Self::default();
        for (name, value) in options {
            let slot = match name.as_str() {
                FULL => &mut out.full_cores,
                ACROSS_NUMA => &mut out.distribute_across_numa,
                BY_SOCKET => &mut out.align_by_socket,
                ACROSS_CORES => &mut out.distribute_across_cores,
                STRICT => &mut out.strict_reservation,
                UNCORE => &mut out.prefer_uncore_cache,
                _ => return Err(OptionError::UnknownCpu(name.clone())),
            };
            let gated = match name.as_str() {
                BY_SOCKET | ACROSS_CORES => Some((Feature::CPUManagerPolicyAlphaOptions, "Alpha")),
                ACROSS_NUMA => Some((Feature::CPUManagerPolicyBetaOptions, "Beta")),
                _ => None,
            };
            if let Some((gate, level)) = gated
                && !features::enabled(gate)
            {
                return Err(OptionError::Gated(level, name.clone()));
            }
            *slot = boolean(name, value)?;
        }
        let pairs = [
            (out.full_cores, FULL, ACROSS_CORES, out.distribute_across_cores),
            (out.distribute_across_numa, ACROSS_NUMA, ACROSS_CORES, out.distribute_across_cores),
            (out.prefer_uncore_cache, UNCORE, ACROSS_CORES, out.distribute_across_cores),
            (out.prefer_uncore_cache, UNCORE, ACROSS_NUMA, out.distribute_across_numa),
        ];
        match pairs.iter().find(|(one, _, _, other)| *one && *other) {
            Some((_, one, other, _)) => Err(OptionError::Both(one, other)),
            None => Ok(out),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyOptions {
    pub prefers_closest: bool,
    pub most_nodes: usize,
}

impl Default for TopologyOptions {
    fn default() -> Self {
        Self { prefers_closest: false, most_nodes: LARGEST_NUMA_COUNT }
    }
}

impl TopologyOptions {
    pub fn parse(options: &BTreeMap<String, String>) -> Result<Self, OptionError> {
        let mut out = Self::default();
        for (name, value) in options {
            match name.as_str() {
                "prefer-closest-numa-nodes" => out.prefers_closest = boolean(name, value)?,
                "max-allowable-numa-nodes" => {
                    let number = value.parse::<usize>();
                    let wrong = |_| OptionError::Number(name.clone(), value.clone());
                    out.most_nodes = number.map_err(wrong)?;
                    if out.most_nodes < LARGEST_NUMA_COUNT {
                        return Err(OptionError::TooFewNodes(name.clone()));
                    }
                }
                _ => return Err(OptionError::UnknownTopology(name.clone())),
            }
        }
        Ok(out)
    }
}

/// The spellings of Go's `strconv.ParseBool`.
fn boolean(name: &str, value: &str) -> Result<bool, OptionError> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(OptionError::Bool(name.to_owned(), value.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    #[test]
    fn options_are_parsed() {
        let cpu = |pairs: &[(&str, &str)]| CpuOptions::parse(&map(pairs));
        let both = cpu(&[(FULL, "true"), (ACROSS_NUMA, "1"), (STRICT, "false")]).expect("valid");
        assert!(both.full_cores && both.distribute_across_numa && !both.strict_reservation);
        let check = |pairs: &[(&str, &str)], expected: &str| {
            assert_eq!(cpu(pairs).expect_err("wrong").to_string(), expected);
        };
        check(&[("x", "true")], "unknown CPU Manager Policy option: \"x\"");
        check(
            &[(FULL, "yes")],
            "bad value for option \"full-pcpus-only\": strconv.ParseBool: parsing \"yes\": invalid syntax",
        );
        check(
            &[(BY_SOCKET, "true")],
            "CPU Manager Policy Alpha-level Options not enabled, but option \"align-by-socket\" provided",
        );
        check(
            &[(UNCORE, "true"), (ACROSS_NUMA, "true")],
            "static policy options prefer-align-cpus-by-uncorecache and distribute-cpus-across-numa can \
             not be used at the same time",
        );
        let few = TopologyOptions::parse(&map(&[("max-allowable-numa-nodes", "4")]));
        assert_eq!(
            few.expect_err("too few").to_string(),
            "the minimum value of \"max-allowable-numa-nodes\" should not be less than 8"
        );
    }
}
