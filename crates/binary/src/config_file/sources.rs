//! A configuration file and its drop-ins.
//!
//! ```text
//! config.yaml  ►  config.yaml.d/*.yaml, *.yml in alphabetical order
//!   key: value      the key's values so far are replaced
//!   key+: value     the value is added to them
//! ```
//!
//! Upstream: k3s' `configfilearg`.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::{Map, Value};

use super::known::{Known, Setting};

/// The merged content.
#[derive(Debug, Default)]
pub struct Files {
    keys: BTreeMap<String, Merged>,
}

#[derive(Debug)]
struct Merged {
    values: Vec<Value>,
    /// The last file with the key, for errors.
    file: PathBuf,
}

impl Files {
    /// Without `must_exist`, no file is no setting.
    pub fn read(main: &Path, must_exist: bool) -> anyhow::Result<Self> {
        let mut files = Self::default();
        match std::fs::read_to_string(main) {
            Ok(text) => files.add(main, &text)?,
            Err(error) if error.kind() == ErrorKind::NotFound && !must_exist => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied && !must_exist => {
                bail!(
                    "cannot read {}: {error}; run as root, or name another file with --config (/dev/null for none)",
                    main.display()
                );
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", main.display()));
            }
        }
        for path in drop_ins(main)? {
            let text = std::fs::read_to_string(&path);
            files.add(&path, &text.with_context(|| format!("cannot read {}", path.display()))?)?;
        }
        Ok(files)
    }

    fn add(&mut self, path: &Path, text: &str) -> anyhow::Result<()> {
        let file = path.display();
        let read: Value =
            serde_saphyr::from_str(text).with_context(|| format!("{file} is not valid YAML"))?;
        let settings = match read {
            Value::Object(map) => map,
            Value::Null => Map::new(),
            _ => bail!("{file}: expected a YAML map of flags"),
        };
        for (key, value) in settings {
            let (key, adds) = match key.strip_suffix('+') {
                Some(bare) => (bare.to_owned(), true),
                None => (key, false),
            };
            let values = match value {
                Value::Array(list) => list,
                Value::Null => vec![],
                other => vec![other],
            };
            let merged = self
                .keys
                .entry(key)
                .or_insert_with(|| Merged { values: vec![], file: path.to_owned() });
            if !adds {
                merged.values.clear();
            }
            merged.values.extend(values);
            merged.file = path.to_owned();
        }
        Ok(())
    }

    /// # Errors
    /// A key is no flag of the command, or has a value that the flag does not take.
    pub fn settings(self, known: &Known) -> anyhow::Result<Vec<Setting>> {
        let mut all = vec![];
        for (key, Merged { mut values, file }) in self.keys {
            let name = known.name(&key).with_context(|| file.display().to_string())?;
            let value = match values.len() {
                1 => values.remove(0),
                0 => Value::Null,
                _ => Value::Array(values),
            };
            let setting = known.setting(&name, value);
            all.push(setting.with_context(|| format!("{}: {key}", file.display()))?);
        }
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all.retain(|setting| !setting.words.is_empty());
        Ok(all)
    }

    /// The text of a key.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.keys.get(key)?.values.last()?.as_str()
    }
}

fn drop_ins(main: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut name = main.as_os_str().to_owned();
    name.push(".d");
    let directory = PathBuf::from(name);
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(vec![]);
        }
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", directory.display()));
        }
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let paths: Vec<PathBuf> = paths.collect::<std::io::Result<_>>()?;
    let is_yaml = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
    };
    let mut paths: Vec<PathBuf> = paths.into_iter().filter(is_yaml).collect();
    paths.sort_unstable();
    Ok(paths)
}
