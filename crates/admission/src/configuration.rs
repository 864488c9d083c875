//! AdmissionConfiguration: the plugins' configurations from `--admission-control-config-file`.
//!
//! In: YAML, with inline configurations or paths of their files. Out: a tree per plugin.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::OptionsError;

/// Plugin names and their configurations.
#[derive(Clone, Debug, Default)]
pub struct Configuration(BTreeMap<String, Value>);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    kind: String,
    #[serde(default)]
    plugins: Vec<Plugin>,
}

#[derive(Deserialize)]
struct Plugin {
    name: String,
    path: Option<String>,
    configuration: Option<Value>,
}

impl Configuration {
    /// Relative paths are relative to the file.
    pub fn read(file: &Path) -> Result<Self, OptionsError> {
        let text = |path: &Path| {
            let path = path.to_owned();
            std::fs::read_to_string(&path).map_err(|error| OptionsError::File { path, error })
        };
        let directory = file.parent().unwrap_or(Path::new("."));
        Self::parse(&text(file)?, |path| text(&directory.join(path)))
    }

    /// `read` returns a plugin's own file, by the path in the text.
    pub fn parse(
        text: &str,
        read: impl Fn(&str) -> Result<String, OptionsError>,
    ) -> Result<Self, OptionsError> {
        let file: File =
            serde_saphyr::from_str(text).map_err(|error| OptionsError::Syntax(Box::new(error)))?;
        if file.kind != "AdmissionConfiguration" {
            return Err(OptionsError::Kind(file.kind));
        }
        let mut all = BTreeMap::new();
        for plugin in file.plugins {
            let tree = match (plugin.configuration, plugin.path.as_deref()) {
                (Some(tree), _) => tree,
                (None, Some(path)) if !path.is_empty() => {
                    serde_saphyr::from_str(&read(path)?).map_err(|error| {
                        OptionsError::PluginFile { path: path.to_owned(), error: Box::new(error) }
                    })?
                }
                _ => continue,
            };
            all.insert(plugin.name, tree);
        }
        Ok(Self(all))
    }

    pub(crate) fn of(&self, plugin: &str) -> Option<&Value> {
        self.0.get(plugin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_configured_in_place_or_by_path() {
        let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n\
            - name: PodSecurity\n  configuration:\n    defaults: {enforce: baseline}\n\
            - name: EventRateLimit\n  path: limits.yaml\n";
        let read = |path: &str| match path {
            "limits.yaml" => Ok("limits: []".to_owned()),
            other => Err(OptionsError::Kind(other.into())),
        };
        let all = Configuration::parse(text, read).expect("a configuration");
        let enforce = all.of("PodSecurity").map(|tree| tree["defaults"]["enforce"].clone());
        assert_eq!(enforce, Some("baseline".into()));
        assert!(all.of("EventRateLimit").is_some_and(|tree| tree["limits"].is_array()));
        assert!(Configuration::parse("kind: Pod", read).is_err());
    }
}
