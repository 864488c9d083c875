//! The record of claims that drivers were asked to prepare: `<root>/dra_manager_state`.
//!
//! ```text
//! {"Data": "<JSON: kind, apiVersion, ClaimInfoStateList>", "Checksum": <CRC-32 of Data>}
//! ```
//!
//! Invariant: the file's format is upstream's, so that either kubelet can read the other's file. An
//! unreadable file is logged and ignored.
//! Upstream: `pkg/kubelet/cm/dra/state`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::{Deserialize, Serialize};

use super::DraError;
use super::messages::{self, Claim};

const FILE: &str = "dra_manager_state";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Record {
    #[serde(rename = "ClaimUID")]
    pub uid: String,
    #[serde(rename = "ClaimName")]
    pub name: String,
    pub namespace: String,
    #[serde(rename = "PodUIDs", with = "set")]
    pub pods: BTreeSet<String>,
    #[serde(rename = "DriverState")]
    pub drivers: BTreeMap<String, DriverState>,
    /// Prepared by this kubelet: after a restart, drivers are asked again.
    #[serde(skip)]
    is_prepared: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct DriverState {
    devices: Option<Vec<Device>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Device {
    pub pool_name: String,
    pub device_name: String,
    #[serde(rename = "ShareID")]
    pub share_id: Option<String>,
    request_names: Option<Vec<String>>,
    #[serde(rename = "CDIDeviceIDs")]
    pub cdi_device_ids: Option<Vec<String>>,
}

impl From<messages::Device> for Device {
    fn from(device: messages::Device) -> Self {
        Self {
            pool_name: device.pool_name,
            device_name: device.device_name,
            share_id: device.share_id,
            request_names: Some(device.request_names),
            cdi_device_ids: Some(device.cdi_device_ids),
        }
    }
}

impl Record {
    pub fn claim(&self) -> Claim {
        Claim { namespace: self.namespace.clone(), uid: self.uid.clone(), name: self.name.clone() }
    }

    /// The devices with their drivers.
    pub fn devices(&self) -> impl Iterator<Item = (&String, &Device)> {
        let of = |(name, state)| {
            let DriverState { devices }: &DriverState = state;
            devices.iter().flatten().map(move |device| (name, device))
        };
        self.drivers.iter().flat_map(of)
    }

    /// The CDI devices of a request; an empty request means all.
    pub fn cdi_devices(&self, request: &str) -> impl Iterator<Item = &str> {
        let devices = self.drivers.values().flat_map(|driver| driver.devices.iter().flatten());
        let of_request = move |device: &&Device| {
            let requests = device.request_names.as_deref().unwrap_or_default();
            request.is_empty() || requests.is_empty() || requests.iter().any(|one| one == request)
        };
        let names = |device| {
            let Device { cdi_device_ids, .. }: &Device = device;
            cdi_device_ids.iter().flatten().map(String::as_str)
        };
        devices.filter(of_request).flat_map(names)
    }
}

/// Go's form of a set: `{"a": {}}`.
mod set {
    use std::collections::{BTreeMap, BTreeSet};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Nothing {}

    pub fn serialize<S: Serializer>(set: &BTreeSet<String>, to: S) -> Result<S::Ok, S::Error> {
        let map: BTreeMap<&String, Nothing> = set.iter().map(|one| (one, Nothing {})).collect();
        map.serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeSet<String>, D::Error> {
        let map = Option::<BTreeMap<String, Nothing>>::deserialize(from)?;
        Ok(map.unwrap_or_default().into_keys().collect())
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: String,
    checksum: u32,
}

#[derive(Serialize, Deserialize)]
struct Data {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(rename = "ClaimInfoStateList", default)]
    records: Option<Vec<Record>>,
}

/// The IEEE polynomial, reflected.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// By namespace and name.
type Key = (String, String);

pub struct Table {
    file: PathBuf,
    records: BTreeMap<Key, Record>,
}

fn key(record: &Record) -> Key {
    (record.namespace.clone(), record.name.clone())
}

impl Table {
    pub fn read(root: &Path) -> Self {
        let file = root.join(FILE);
        let records = match read(&file) {
            Ok(records) => records,
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            Err(error) => {
                tracing::error!(file = %file.display(), %error, "failed to read the prepared claims");
                vec![]
            }
        };
        let records = records.into_iter().map(|record| (key(&record), record)).collect();
        Self { file, records }
    }

    fn write(&self) -> Result<(), DraError> {
        let data = Data {
            kind: "DRACheckpoint".into(),
            api_version: "checkpoint.dra.kubelet.k8s.io/v1".into(),
            records: Some(self.records.values().cloned().collect()),
        };
        let done = || {
            let data = serde_json::to_string(&data).map_err(io::Error::other)?;
            let checkpoint = Checkpoint { checksum: crc32(data.as_bytes()), data };
            let next = self.file.with_extension("new");
            std::fs::write(&next, serde_json::to_vec(&checkpoint).map_err(io::Error::other)?)?;
            std::fs::rename(next, &self.file)
        };
        done().map_err(DraError::Checkpoint)
    }

    pub fn get(&self, namespace: &str, name: &str) -> Option<&Record> {
        self.records.get(&(namespace.to_owned(), name.to_owned()))
    }

    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.records.values()
    }

    /// Records that a pod uses a claim. Returns the claim that drivers must prepare, if any.
    pub fn note(
        &mut self,
        claim: &ResourceClaim,
        drivers: &BTreeSet<String>,
        pod: &str,
    ) -> Result<Option<Claim>, DraError> {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let meta = &claim.metadata;
        let new = Record {
            uid: text(&meta.uid),
            name: text(&meta.name),
            namespace: text(&meta.namespace),
            drivers: drivers.iter().map(|name| (name.clone(), DriverState::default())).collect(),
            ..Record::default()
        };
        let uid = new.uid.clone();
        let record = self.records.entry(key(&new)).or_insert(new);
        if record.uid != uid {
            let (name, uid) = (record.name.clone(), record.uid.clone());
            return Err(DraError::OldClaim { name, uid });
        }
        record.pods.insert(pod.to_owned());
        let asked = (!record.is_prepared).then(|| record.claim());
        self.write()?;
        Ok(asked)
    }

    /// Records the devices that a driver has prepared.
    pub fn devices(&mut self, claim: &Claim, driver: &str, devices: Vec<Device>) {
        let key = (claim.namespace.clone(), claim.name.clone());
        if let Some(record) = self.records.get_mut(&key) {
            record.drivers.entry(driver.to_owned()).or_default().devices = Some(devices);
        }
    }

    /// Marks claims as prepared by all drivers.
    pub fn prepared(&mut self, uids: &BTreeSet<String>) -> Result<(), DraError> {
        if uids.is_empty() {
            return Ok(());
        }
        for record in self.records.values_mut().filter(|record| uids.contains(&record.uid)) {
            record.is_prepared = true;
        }
        self.write()
    }

    /// Removes an ended pod. Returns the claims that no other pod uses; they stay on record until `forget`.
    pub fn leave(&mut self, pod: &str) -> Vec<Record> {
        let mut last = vec![];
        for record in self.records.values_mut().filter(|record| record.pods.contains(pod)) {
            if record.pods.len() > 1 {
                record.pods.remove(pod);
            } else {
                last.push(record.clone());
            }
        }
        last
    }

    /// Removes the records of unprepared claims.
    pub fn forget(&mut self, given_back: &[Record]) -> Result<(), DraError> {
        for record in given_back {
            self.records.remove(&key(record));
        }
        self.write()
    }
}

fn read(file: &Path) -> io::Result<Vec<Record>> {
    let checkpoint: Checkpoint =
        serde_json::from_slice(&std::fs::read(file)?).map_err(io::Error::other)?;
    if crc32(checkpoint.data.as_bytes()) != checkpoint.checksum {
        return Err(io::Error::other("checkpoint is corrupted"));
    }
    let data: Data = serde_json::from_str(&checkpoint.data).map_err(io::Error::other)?;
    Ok(data.records.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn claim(uid: &str) -> ResourceClaim {
        let meta = json!({"name": "c", "namespace": "ns", "uid": uid});
        from_value(json!({"metadata": meta, "spec": {}})).unwrap()
    }

    #[test]
    fn a_claim_is_on_record_while_a_pod_uses_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let drivers = BTreeSet::from(["d".to_owned()]);
        let mut table = Table::read(dir.path());
        let asked = table.note(&claim("u"), &drivers, "p1").unwrap().expect("it is new");
        let device = |request: &str, id: &str| {
            Device::from(messages::Device {
                request_names: vec![request.into()],
                pool_name: "pool".into(),
                device_name: id.into(),
                cdi_device_ids: vec![format!("example.com/gpu={id}")],
                share_id: None,
            })
        };
        table.devices(&asked, "d", vec![device("a", "1"), device("b", "2")]);
        table.prepared(&[asked.uid.clone()].into()).unwrap();
        assert_eq!(table.note(&claim("u"), &drivers, "p2").expect("noted"), None);
        assert!(table.note(&claim("other"), &drivers, "p3").is_err());

        let mut again = Table::read(dir.path());
        let record = again.get("ns", "c").expect("it is on the disk");
        let all: Vec<&str> = record.cdi_devices("").collect();
        assert_eq!(all, ["example.com/gpu=1", "example.com/gpu=2"]);
        assert_eq!(record.cdi_devices("b").collect::<Vec<_>>(), ["example.com/gpu=2"]);
        // A restarted kubelet asks again.
        assert_eq!(again.note(&claim("u"), &drivers, "p2").expect("noted"), Some(asked));
        assert_eq!(again.leave("p1"), []);
        let last = again.leave("p2");
        assert_eq!(last.len(), 1);
        again.forget(&last).unwrap();
        assert!(Table::read(dir.path()).records.is_empty());
    }

    #[test]
    fn the_file_has_upstreams_format() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut table = Table::read(dir.path());
        table.note(&claim("u"), &["d".to_owned()].into(), "p").unwrap();
        let text = std::fs::read(dir.path().join(FILE)).expect("a file");
        let file: Value = serde_json::from_slice(&text).expect("JSON");
        let data = file["Data"].as_str().expect("text");
        let expected = r#"{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[{"ClaimUID":"u","ClaimName":"c","Namespace":"ns","PodUIDs":{"p":{}},"DriverState":{"d":{"Devices":null}}}]}"#;
        assert_eq!(data, expected);
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(file["Checksum"], crc32(expected.as_bytes()));
        std::fs::write(dir.path().join(FILE), r#"{"Data": "{}", "Checksum": 1}"#).unwrap();
        assert_eq!(
            read(&dir.path().join(FILE)).unwrap_err().to_string(),
            "checkpoint is corrupted"
        );
    }
}
