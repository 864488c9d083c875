//! Network configuration files, as libcni reads them.
//!
//! In: a directory. Out: the network of its first file by name, or why that file cannot be used.
//! `.conflist` has a list of plugins; `.conf` and `.json` have one plugin, which becomes a list of one. A list may
//! name more plugins in `<directory>/<name of the network>/*.conf`.
//! Upstream: `libcni/conf.go`, and `loadFromConfDir` of `containerd/go-cni`: only the first file counts, a broken
//! one included.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Versions of the specification whose results this runtime reads, oldest first.
pub(super) const VERSIONS: [&str; 7] =
    ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", CURRENT];
pub(super) const CURRENT: &str = "1.1.0";

/// A network: its plugins run one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Network {
    pub name: String,
    pub version: String,
    pub disable_check: bool,
    pub disable_gc: bool,
    pub plugins: Vec<Plugin>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plugin {
    /// The name of its program.
    pub kind: String,
    /// Its part of the file.
    pub conf: Map<String, Value>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("failed to read config file: {0}")]
    Unreadable(io::Error),
    #[error("failed to load CNI config file {}: {why}", .file.display())]
    Invalid { file: PathBuf, why: Why },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Why {
    #[error("error reading: {0}")]
    Unreadable(#[from] io::Error),
    #[error("error parsing configuration: {0}")]
    NotJson(#[from] serde_json::Error),
    #[error("error parsing configuration list: no name")]
    NoName,
    #[error("invalid characters found in network name {0:?}")]
    Name(String),
    #[error("error parsing configuration list: invalid type or value for {0}")]
    Type(&'static str),
    #[error("error parsing configuration list: no plugins in list")]
    NoPlugins,
    #[error("error parsing configuration: missing 'type'")]
    NoType,
    #[error("CNI version {0:?} is not supported; supported are {known}", known = VERSIONS.join(", "))]
    Version(String),
}

impl Network {
    /// Whether the network has at least this version of the specification.
    pub(super) fn is_at_least(&self, version: &str) -> bool {
        number(&self.version) >= number(version)
    }

    /// Whether a plugin takes this part of the runtime's configuration.
    pub(crate) fn has_capability(&self, name: &str) -> bool {
        self.plugins.iter().any(|plugin| plugin.has_capability(name))
    }
}

impl Plugin {
    fn parse(value: Value) -> Result<Self, Why> {
        let Value::Object(conf) = value else { return Err(Why::Type("plugins")) };
        match conf.get("type").and_then(Value::as_str) {
            Some(kind) if !kind.is_empty() => Ok(Self { kind: kind.to_owned(), conf }),
            _ => Err(Why::NoType),
        }
    }

    pub(super) fn has_capability(&self, name: &str) -> bool {
        let known = self.conf.get("capabilities").and_then(|all| all.get(name));
        known.and_then(Value::as_bool) == Some(true)
    }
}

/// The network of the directory's first file. `None`: there is no file, or no directory.
pub(super) fn load(directory: &Path) -> Result<Option<(PathBuf, Network)>, ConfigError> {
    let all = files(directory, &["conflist", "conf", "json"]).map_err(ConfigError::Unreadable)?;
    let Some(file) = all.into_iter().next() else { return Ok(None) };
    match read(&file) {
        Ok(network) => Ok(Some((file, network))),
        Err(why) => Err(ConfigError::Invalid { file, why }),
    }
}

/// The files with these extensions, in the order of their names.
fn files(directory: &Path, extensions: &[&str]) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        other => other?,
    };
    let mut all: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    all.retain(|path| {
        let extension = path.extension().and_then(|text| text.to_str()).unwrap_or_default();
        extensions.contains(&extension) && !path.is_dir()
    });
    all.sort();
    Ok(all)
}

fn read(file: &Path) -> Result<Network, Why> {
    let conf: Value = serde_json::from_slice(&fs::read(file)?)?;
    let Value::Object(conf) = conf else { return Err(Why::Type("the file")) };
    if file.extension().is_none_or(|extension| extension != "conflist") {
        let version = version(&conf)?;
        let plugin = Plugin::parse(Value::Object(conf))?;
        return Ok(Network {
            name: name(&plugin.conf)?,
            version,
            disable_check: false,
            disable_gc: false,
            plugins: vec![plugin],
        });
    }
    let network = Network {
        name: name(&conf)?,
        version: version(&conf)?,
        disable_check: flag(&conf, "disableCheck")?,
        disable_gc: flag(&conf, "disableGC")?,
        plugins: vec![],
    };
    let plugins = plugins(&conf, file, &network.name)?;
    Ok(Network { plugins, ..network })
}

/// The plugins of a list, and those in the directory beside it.
fn plugins(conf: &Map<String, Value>, file: &Path, network: &str) -> Result<Vec<Plugin>, Why> {
    let mut plugins = match conf.get("plugins") {
        None => vec![],
        Some(Value::Array(all)) if all.is_empty() => return Err(Why::NoPlugins),
        Some(Value::Array(all)) => {
            all.iter().cloned().map(Plugin::parse).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(Why::Type("plugins")),
    };
    if !flag(conf, "loadOnlyInlinedPlugins")? {
        let beside = file.with_file_name(network);
        for more in files(&beside, &["conf"])? {
            plugins.push(Plugin::parse(serde_json::from_slice(&fs::read(more)?)?)?);
        }
    }
    if plugins.is_empty() { Err(Why::NoPlugins) } else { Ok(plugins) }
}

fn name(conf: &Map<String, Value>) -> Result<String, Why> {
    let name = match conf.get("name") {
        None => return Err(Why::NoName),
        Some(Value::String(name)) if name.is_empty() => return Err(Why::NoName),
        Some(Value::String(name)) => name,
        Some(_) => return Err(Why::Type("name")),
    };
    // The name becomes a part of paths.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts && name.chars().all(is_plain) {
        Ok(name.clone())
    } else {
        Err(Why::Name(name.clone()))
    }
}

/// The highest version that both sides know: of `cniVersions`, or else `cniVersion`. A file without a version
/// is of 0.1.0.
fn version(conf: &Map<String, Value>) -> Result<String, Why> {
    let single = match conf.get("cniVersion") {
        None => None,
        Some(Value::String(text)) if text.is_empty() => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(_) => return Err(Why::Type("cniVersion")),
    };
    let mut offered: Vec<String> = match conf.get("cniVersions") {
        None => vec![],
        Some(Value::Array(all)) => {
            let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
            all.iter().map(text).collect::<Option<_>>().ok_or(Why::Type("cniVersions"))?
        }
        Some(_) => return Err(Why::Type("cniVersions")),
    };
    if let Some(wrong) = offered.iter().find(|text| number(text).is_none()) {
        return Err(Why::Version(wrong.clone()));
    }
    let chosen = if offered.is_empty() {
        single.unwrap_or_else(|| VERSIONS[0].to_owned())
    } else {
        offered.extend(single);
        let known = offered.iter().filter(|text| number(text) <= number(CURRENT));
        let best = known.max_by_key(|text| number(text));
        best.or(offered.first()).cloned().unwrap_or_default()
    };
    if VERSIONS.contains(&chosen.as_str()) { Ok(chosen) } else { Err(Why::Version(chosen)) }
}

fn flag(conf: &Map<String, Value>, key: &'static str) -> Result<bool, Why> {
    match conf.get(key) {
        None => Ok(false),
        Some(Value::Bool(is_on)) => Ok(*is_on),
        Some(Value::String(text)) if text.eq_ignore_ascii_case("true") => Ok(true),
        Some(Value::String(text)) if text.eq_ignore_ascii_case("false") => Ok(false),
        Some(_) => Err(Why::Type(key)),
    }
}

fn number(version: &str) -> Option<[u32; 3]> {
    let mut out = [0; 3];
    let parts: Vec<&str> = version.split('.').collect();
    if parts.len() > out.len() {
        return None;
    }
    for (place, part) in out.iter_mut().zip(parts) {
        *place = part.parse().ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(files: &[(&str, &str)]) -> Result<Option<Network>, String> {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, content) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, content).expect("written");
        }
        let shown = directory.path().display().to_string();
        match load(directory.path()) {
            Ok(found) => Ok(found.map(|(_, network)| network)),
            Err(error) => Err(error.to_string().replace(&shown, "DIR")),
        }
    }

    #[test]
    fn the_first_file_by_name_counts() {
        let list = |name: &str| format!(r#"{{"name":"{name}","plugins":[{{"type":"a"}}]}}"#);
        let (ten, twenty) = (list("ten"), list("twenty"));
        let check = |files: &[(&str, &str)], expected: Option<&str>| {
            let network = loaded(files).expect("valid");
            assert_eq!(network.map(|network| network.name).as_deref(), expected, "{files:?}");
        };
        check(&[], None);
        check(&[("20-x.conflist", &twenty), ("10-x.conflist", &ten)], Some("ten"));
        check(&[("10-x.conf", r#"{"name":"one","type":"a"}"#), ("20.conflist", &ten)], Some("one"));
        check(&[("10-x.json", r#"{"name":"one","type":"a"}"#)], Some("one"));
        check(&[("10-x.conflist.bak", &ten), ("README", "x")], None);
        check(&[("10.conflist/keep", "x"), ("20-x.conflist", &twenty)], Some("twenty"));
    }

    #[test]
    fn plugins_may_lie_beside_the_list() {
        let only = r#"{"name":"n","plugins":[{"type":"a"}],"loadOnlyInlinedPlugins":true}"#;
        let also = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
        let none = r#"{"name":"n"}"#;
        for (list, expected) in
            [(only, vec!["a"]), (also, vec!["a", "b", "c"]), (none, vec!["b", "c"])]
        {
            let more = [
                ("x.conflist", list),
                ("n/2.conf", r#"{"type":"c"}"#),
                ("n/1.conf", r#"{"type":"b"}"#),
            ];
            let network = loaded(&more).expect("valid").expect("a network");
            let kinds: Vec<_> = network.plugins.iter().map(|plugin| plugin.kind.as_str()).collect();
            assert_eq!(kinds, expected);
        }
    }

    #[test]
    fn versions_are_negotiated() {
        let check = |versions: &str, expected: Result<&str, &str>| {
            let text = format!(r#"{{"name":"n","plugins":[{{"type":"a"}}]{versions}}}"#);
            let got = loaded(&[("x.conflist", &text)]);
            match expected {
                Ok(version) => {
                    assert_eq!(got.expect("valid").expect("a network").version, version);
                }
                Err(part) => {
                    let error = got.expect_err("refused");
                    assert!(error.contains(part), "{error}");
                }
            }
        };
        check("", Ok("0.1.0"));
        check(r#","cniVersion":"0.4.0""#, Ok("0.4.0"));
        check(r#","cniVersion":"1.1.0""#, Ok("1.1.0"));
        check(r#","cniVersions":["0.3.1","1.0.0"]"#, Ok("1.0.0"));
        check(r#","cniVersion":"0.4.0","cniVersions":["0.3.1"]"#, Ok("0.4.0"));
        check(r#","cniVersions":["0.3.1","1.1.0","9.0.0"]"#, Ok("1.1.0"));
        check(r#","cniVersion":"9.0.0""#, Err("CNI version \"9.0.0\" is not supported"));
        check(r#","cniVersions":["9.0.0"]"#, Err("CNI version \"9.0.0\" is not supported"));
        check(r#","cniVersions":["new"]"#, Err("CNI version \"new\" is not supported"));
        check(r#","cniVersion":1"#, Err("invalid type or value for cniVersion"));
    }

    #[test]
    fn a_broken_file_says_why() {
        let check = |name: &str, content: &str, expected: &str| {
            let error = loaded(&[(name, content)]).expect_err("refused");
            assert_eq!(error, format!("failed to load CNI config file DIR/{name}: {expected}"));
        };
        let parsing = "error parsing configuration list:";
        check("a.conflist", r#"{"plugins":[{"type":"a"}]}"#, &format!("{parsing} no name"));
        check(
            "a.conflist",
            r#"{"name":"n","plugins":[]}"#,
            &format!("{parsing} no plugins in list"),
        );
        check("a.conflist", r#"{"name":"n"}"#, &format!("{parsing} no plugins in list"));
        let missing = "error parsing configuration: missing 'type'";
        check("a.conflist", r#"{"name":"n","plugins":[{}]}"#, missing);
        check("a.conf", r#"{"name":"n","plugins":[{"type":"a"}]}"#, missing);
        check(
            "a.conflist",
            r#"{"name":"../n"}"#,
            "invalid characters found in network name \"../n\"",
        );
        let of_flag = format!("{parsing} invalid type or value for disableCheck");
        let text = r#"{"name":"n","disableCheck":1,"plugins":[{"type":"a"}]}"#;
        check("a.conflist", text, &of_flag);
        let half = loaded(&[("a.conflist", r#"{"name":"#)]).expect_err("refused");
        assert!(half.contains("error parsing configuration: EOF"), "{half}");
    }
}
