//! Feature gates with upstream's names, stages and defaults, and their effects here.
//!
//! In: values of gates, such as `A=true,B=false`, from flags and configuration files. Out: the enabled
//! gates ([`enabled`], which gated code calls), warnings for the user
//! ([`notices`]), a list for `--help` and the figure `kubernetes_feature_enabled`.
//!
//! Gates are of the process, as upstream's: the binary calls [`install`] once, before anything runs.
//! Tests set them for their own thread with [`scoped`].
//! Upstream: `k8s.io/component-base/featuregate`.

mod table;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

pub use table::Feature;
use table::{DEPENDENCIES, TABLE};

/// The effect of a gate that is enabled or disabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Code asks the gate: it enables and disables the feature.
    Decides,
    /// The gate opens and closes parts of the API; nothing acts on what stands in them.
    Fields,
    /// The feature is there always.
    BuiltIn,
    /// The feature is not there, or it is a matter of upstream's insides.
    Absent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Alpha,
    Beta,
    Stable,
    Deprecated,
}

impl Stage {
    /// As upstream's help and metrics say it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Stable => "",
            Self::Deprecated => "DEPRECATED",
        }
    }
}

/// The default of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Off,
    On,
    LockedOff,
    LockedOn,
}

#[derive(Debug)]
struct Spec {
    name: &'static str,
    stage: Stage,
    state: State,
    effect: Effect,
}

impl Spec {
    const fn is_on(&self) -> bool {
        matches!(self.state, State::On | State::LockedOn)
    }

    const fn is_locked(&self) -> bool {
        matches!(self.state, State::LockedOff | State::LockedOn)
    }
}

impl Feature {
    const fn spec(self) -> &'static Spec {
        &TABLE[self as usize].1
    }

    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|(feature, _)| *feature)
    }

    pub fn parse(name: &str) -> Option<Self> {
        let at = TABLE.binary_search_by(|(_, spec)| spec.name.cmp(name)).ok()?;
        Some(TABLE[at].0)
    }

    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    pub const fn stage(self) -> Stage {
        self.spec().stage
    }

    pub const fn effect(self) -> Effect {
        self.spec().effect
    }

    pub const fn is_on_by_default(self) -> bool {
        self.spec().is_on()
    }

    const fn place(self) -> (usize, u64) {
        let number = self as usize;
        (number / 64, 1 << (number % 64))
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

const WORDS: usize = TABLE.len().div_ceil(64);

/// Which gates are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gates([u64; WORDS]);

impl Gates {
    /// Upstream's defaults.
    pub const DEFAULT: Self = {
        let mut words = [0; WORDS];
        let mut at = 0;
        while at < TABLE.len() {
            if TABLE[at].1.is_on() {
                words[at / 64] |= 1 << (at % 64);
            }
            at += 1;
        }
        Self(words)
    };

    pub const fn enabled(&self, feature: Feature) -> bool {
        let (word, bit) = feature.place();
        self.0[word] & bit != 0
    }

    #[must_use]
    pub const fn with(mut self, feature: Feature, is_on: bool) -> Self {
        let (word, bit) = feature.place();
        self.0[word] = if is_on { self.0[word] | bit } else { self.0[word] & !bit };
        self
    }
}

impl Default for Gates {
    fn default() -> Self {
        Self::DEFAULT
    }
}

static INSTALLED: [AtomicU64; WORDS] = {
    let mut words = [const { AtomicU64::new(0) }; WORDS];
    let mut at = 0;
    while at < WORDS {
        words[at] = AtomicU64::new(Gates::DEFAULT.0[at]);
        at += 1;
    }
    words
};

thread_local! {
    /// Of a test.
    static SCOPED: Cell<Option<Gates>> = const { Cell::new(None) };
}

/// The process's gates from now on.
pub fn install(gates: Gates) {
    for (word, value) in INSTALLED.iter().zip(gates.0) {
        word.store(value, Ordering::Relaxed);
    }
}

pub fn current() -> Gates {
    SCOPED.get().unwrap_or_else(|| {
        Gates(std::array::from_fn(|word| INSTALLED[word].load(Ordering::Relaxed)))
    })
}

/// Is the gate open?
pub fn enabled(feature: Feature) -> bool {
    let (word, bit) = feature.place();
    match SCOPED.get() {
        None => INSTALLED[word].load(Ordering::Relaxed) & bit != 0,
        Some(gates) => gates.enabled(feature),
    }
}

/// Runs `work` as if these were the process's gates, on this thread.
pub fn scoped<T>(gates: Gates, work: impl FnOnce() -> T) -> T {
    struct Before(Option<Gates>);
    impl Drop for Before {
        fn drop(&mut self) {
            SCOPED.set(self.0);
        }
    }
    let _before = Before(SCOPED.replace(Some(gates)));
    work()
}

/// The given values of gates by name. The last value counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    gates: BTreeMap<String, bool>,
    /// With and without the component's name.
    has_plain: bool,
    has_named: bool,
}

/// The component that gates without one are of.
const COMPONENT: &str = "kube";

impl Said {
    /// `A=true,B=false`, each of which may begin with `kube:`, in upstream's words where something is
    /// wrong.
    pub fn add(&mut self, text: &str) -> Result<(), String> {
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let pair = match pair.split_once(':') {
                None => {
                    self.has_plain = true;
                    pair
                }
                Some((component, pair)) if component.trim() == COMPONENT => {
                    self.has_named = true;
                    pair.trim()
                }
                Some((component, _)) => {
                    return Err(format!("component not registered: {}", component.trim()));
                }
            };
            let (name, value) = pair.split_once('=').map_or((pair, None), |(k, v)| (k, Some(v)));
            let name = name.trim();
            let value = value.ok_or_else(|| format!("missing bool value for {name}"))?.trim();
            let is_on = parse_bool(value).ok_or_else(|| {
                format!(
                    "invalid value of {name}={value}, err: strconv.ParseBool: parsing {value:?}: invalid syntax"
                )
            })?;
            self.gates.insert(name.to_owned(), is_on);
        }
        match self.has_plain && self.has_named {
            true => Err("set kube feature gates with default empty prefix or kube: prefix consistently, do not mix use".into()),
            false => Ok(()),
        }
    }

    /// The gates that come of it. Upstream: `featureGate.unsafeSetFromMap`.
    pub fn resolve(&self) -> Result<Gates, String> {
        let mut errors = vec![];
        let mut gates = self.whole_stages();
        for (name, is_on) in &self.gates {
            let feature =
                Feature::parse(name).ok_or_else(|| format!("unrecognized feature gate: {name}"))?;
            let spec = feature.spec();
            if spec.is_locked() && spec.is_on() != *is_on {
                errors.push(format!(
                    "cannot set feature gate {name} to {is_on}, feature is locked to {}",
                    spec.is_on()
                ));
                continue;
            }
            gates = gates.with(feature, *is_on);
        }
        if errors.is_empty() {
            errors.extend(missing_dependencies(&gates));
        }
        match errors.as_slice() {
            [] => Ok(gates),
            [error] => Err(error.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }

    /// What AllAlpha and AllBeta make of the gates that nothing is said of.
    fn whole_stages(&self) -> Gates {
        let mut gates = Gates::DEFAULT;
        for all in WHOLE_STAGES {
            let Some(is_on) = self.gates.get(all.name()) else { continue };
            for feature in Feature::all().filter(|feature| feature.stage() == all.stage()) {
                if !WHOLE_STAGES.contains(&feature) {
                    gates = gates.with(feature, *is_on);
                }
            }
        }
        gates
    }

    /// Warnings about the given values, after [`resolve`](Self::resolve).
    pub fn notices(&self, gates: &Gates) -> Vec<String> {
        let is_said = |feature: Feature| {
            gates.enabled(feature) != feature.is_on_by_default()
                || self.gates.contains_key(feature.name())
        };
        let told = |effect: Effect, is_on: bool, one: &str, many: &str| {
            let names: Vec<&str> = Feature::all()
                .filter(|feature| feature.effect() == effect && is_said(*feature))
                .filter(|feature| gates.enabled(*feature) == is_on)
                .map(Feature::name)
                .collect();
            match names.as_slice() {
                [] => None,
                [name] => Some(format!("feature gate {name} {one}")),
                names => Some(format!("feature gates {} {many}", names.join(", "))),
            }
        };
        let of_stage = |(name, is_on): (&String, &bool)| {
            let stage = match Feature::parse(name)?.stage() {
                Stage::Stable => "GA",
                Stage::Deprecated => "deprecated",
                Stage::Alpha | Stage::Beta => return None,
            };
            Some(format!(
                "setting {stage} feature gate {name}={is_on}. It will be removed in a future release."
            ))
        };
        let own = [
            told(
                Effect::Absent,
                true,
                "is known but not implemented: it changes nothing",
                "are known but not implemented: they change nothing",
            ),
            told(
                Effect::Fields,
                true,
                "opens parts of the API that nothing acts on",
                "open parts of the API that nothing acts on",
            ),
            told(
                Effect::BuiltIn,
                false,
                "cannot be closed: its feature is built in",
                "cannot be closed: their features are built in",
            ),
        ];
        self.gates.iter().filter_map(of_stage).chain(own.into_iter().flatten()).collect()
    }
}

/// Names for all gates of a stage.
const WHOLE_STAGES: [Feature; 2] = [Feature::AllAlpha, Feature::AllBeta];

fn missing_dependencies(gates: &Gates) -> impl Iterator<Item = String> {
    DEPENDENCIES.iter().filter(|(feature, _)| gates.enabled(*feature)).filter_map(
        |(feature, needed)| {
            let closed = needed.iter().filter(|one| !gates.enabled(**one));
            let closed: Vec<&str> = closed.map(|one| one.name()).collect();
            (!closed.is_empty()).then(|| {
                format!(
                    "{feature} is enabled, but depends on features that are disabled: [{}]",
                    closed.join(" ")
                )
            })
        },
    )
}

/// As Go's `strconv.ParseBool`.
fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// What `--help` says of gates: those that may be opened or closed and do something, by state.
pub fn help() -> String {
    const WIDTH: usize = 100;
    let mut out = String::from(
        "Feature gates (--feature-gates), of which AllAlpha and AllBeta stand for all:",
    );
    for (stage, is_on) in
        [(Stage::Alpha, false), (Stage::Beta, false), (Stage::Beta, true), (Stage::Stable, true)]
    {
        let names = Feature::all().filter(|feature| {
            let spec = feature.spec();
            (spec.stage, spec.is_on(), spec.is_locked()) == (stage, is_on, false)
                && matches!(spec.effect, Effect::Decides | Effect::Fields)
        });
        let label = if stage == Stage::Stable { "GA" } else { stage.label() };
        let mut line = format!("  {label}, {}:", if is_on { "open" } else { "closed" });
        for name in names {
            if line.len() + 1 + name.name().len() > WIDTH {
                let _ = write!(out, "\n{line}");
                line = "   ".into();
            }
            let _ = write!(line, " {name}");
        }
        let _ = write!(out, "\n{line}");
    }
    let _ = write!(
        out,
        "\n  The other gates of v{} are known, too, and change nothing.",
        crate::KUBERNETES.short
    );
    out
}

/// The figure `kubernetes_feature_enabled`.
pub fn encode_metrics(out: &mut String) {
    const NAME: &str = "kubernetes_feature_enabled";
    let gates = current();
    let _ = writeln!(
        out,
        "# HELP {NAME} [BETA] This metric records the data about the stage and enablement of a k8s feature.\n# TYPE {NAME} gauge"
    );
    for feature in Feature::all() {
        let (stage, value) = (feature.stage().label(), u8::from(gates.enabled(feature)));
        let _ = writeln!(out, "{NAME}{{name=\"{feature}\",stage=\"{stage}\"}} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Result<Said, String> {
        let mut said = Said::default();
        text.split(';').try_for_each(|flag| said.add(flag))?;
        Ok(said)
    }

    #[test]
    fn the_table_is_in_order_and_sound() {
        assert!(TABLE.is_sorted_by(|(one, a), (other, b)| one < other && a.name < b.name));
        for feature in Feature::all() {
            assert_eq!(Feature::parse(feature.name()), Some(feature));
        }
        assert_eq!(Feature::parse("Nonsense"), None);
        assert_eq!(missing_dependencies(&Gates::DEFAULT).collect::<Vec<_>>(), [""; 0]);
        let order = |stage| match stage {
            Stage::Deprecated => 0,
            Stage::Alpha => 1,
            Stage::Beta => 2,
            Stage::Stable => 3,
        };
        for (feature, needed) in DEPENDENCIES {
            for one in *needed {
                assert!(order(feature.stage()) <= order(one.stage()), "{feature} needs {one}");
            }
        }
    }

    #[test]
    fn gates_are_opened_and_closed() {
        let check = |text: &str, expected: &[(Feature, bool)]| {
            let gates = said(text).and_then(|said| said.resolve()).expect(text);
            for (feature, is_on) in expected {
                assert_eq!(gates.enabled(*feature), *is_on, "{text}: {feature}");
            }
        };
        use Feature as F;
        check("", &[(F::PodLevelResources, true), (F::ContainerStopSignals, false)]);
        check("ContainerStopSignals=true", &[(F::ContainerStopSignals, true)]);
        check("kube:ContainerStopSignals=T", &[(F::ContainerStopSignals, true)]);
        check("EnvFiles=false;EnvFiles=1", &[(F::EnvFiles, true)]);
        check(
            "AllAlpha=true,HPAScaleToZero=false",
            &[(F::ContainerStopSignals, true), (F::HPAScaleToZero, false), (F::AllAlpha, true)],
        );
        check(
            "EnvFiles=true,AllBeta=0",
            &[(F::EnvFiles, true), (F::HostnameOverride, false), (F::ImageVolume, true)],
        );
        check(" ContainerStopSignals = true ,,", &[(F::ContainerStopSignals, true)]);
    }

    #[test]
    fn mistakes_are_told_as_upstream_does() {
        let check = |text: &str, expected: &str| {
            assert_eq!(said(text).and_then(|said| said.resolve()), Err(expected.into()), "{text}");
        };
        check("Nonsense=true", "unrecognized feature gate: Nonsense");
        check("EnvFiles", "missing bool value for EnvFiles");
        check(
            "EnvFiles=yes",
            "invalid value of EnvFiles=yes, err: strconv.ParseBool: parsing \"yes\": invalid syntax",
        );
        check(
            "ImageVolume=false",
            "cannot set feature gate ImageVolume to false, feature is locked to true",
        );
        check(
            "ImageVolume=false,GitRepoVolumeDriver=true",
            "[cannot set feature gate GitRepoVolumeDriver to true, feature is locked to false, cannot set feature gate ImageVolume to false, feature is locked to true]",
        );
        check(
            "DRAWorkloadResourceClaims=true",
            "DRAWorkloadResourceClaims is enabled, but depends on features that are disabled: [GenericWorkload]",
        );
        check(
            "kube:EnvFiles=true,HostnameOverride=true",
            "set kube feature gates with default empty prefix or kube: prefix consistently, do not mix use",
        );
        check("other:EnvFiles=true", "component not registered: other");
    }

    #[test]
    fn what_changes_nothing_is_said() {
        let check = |text: &str, expected: &[&str]| {
            let said = said(text).expect(text);
            let gates = said.resolve().expect(text);
            assert_eq!(said.notices(&gates), expected, "{text}");
        };
        check("", &[]);
        check("ContainerStopSignals=true,EnvFiles=false", &[]);
        check(
            "NativeHistograms=true",
            &["feature gate NativeHistograms is known but not implemented: it changes nothing"],
        );
        check("NativeHistograms=false", &[]);
        check(
            "OpenAPIEnums=false",
            &["feature gate OpenAPIEnums cannot be closed: its feature is built in"],
        );
        check(
            "ResourceHealthStatusMessage=true,MemoryQoS=true,EventedPLEG=true",
            &[
                "feature gates EventedPLEG, MemoryQoS are known but not implemented: they change nothing",
                "feature gate ResourceHealthStatusMessage opens parts of the API that nothing acts on",
            ],
        );
        check(
            "ImageVolume=true",
            &["setting GA feature gate ImageVolume=true. It will be removed in a future release."],
        );
        let all = said("AllAlpha=true").expect("parses");
        let gates = all.resolve().expect("fits");
        assert_eq!(all.notices(&gates).len(), 2, "one line for each sort");
    }

    #[test]
    fn a_scope_ends() {
        let open = Gates::DEFAULT.with(Feature::ContainerStopSignals, true);
        let inner = scoped(open, || enabled(Feature::ContainerStopSignals));
        assert!(inner && !enabled(Feature::ContainerStopSignals));
    }

    #[test]
    fn help_and_figures_name_them() {
        let help = help();
        assert!(help.lines().all(|line| line.len() <= 100), "{help}");
        assert!(help.contains("ContainerStopSignals") && !help.contains("EventedPLEG"));
        let mut figures = String::new();
        encode_metrics(&mut figures);
        for line in [
            "kubernetes_feature_enabled{name=\"AllAlpha\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"EnvFiles\",stage=\"BETA\"} 1",
            "kubernetes_feature_enabled{name=\"ImageVolume\",stage=\"\"} 1",
            "kubernetes_feature_enabled{name=\"KMSv1\",stage=\"DEPRECATED\"} 0",
        ] {
            assert!(figures.lines().any(|one| one == line), "{line}");
        }
    }
}
