//! The columns of every kind's Table.
//!
//! In: a kind's type. Out: its columns as upstream's printers define them. What describes a field
//! says what the field's schema says, looked up when a Table is made; the rest has words of its own.
//! Cells are in each kind's strategy, or in [`crate::printers`].

use std::borrow::Cow;

use api::schema::{JsonSchema, describe};
use apiserver::resource::{CREATED_AT_COLUMN, Column, Doc, NAME_COLUMN};
use k8s_openapi::api::{
    apiserverinternal::v1alpha1::StorageVersionStatus, apps::v1 as apps,
    autoscaling::v2 as autoscaling_v2, batch::v1 as batch, certificates::v1 as certificates,
    certificates::v1beta1 as trust, coordination::v1 as coordination,
    coordination::v1beta1::LeaseCandidateSpec, core::v1 as core, discovery::v1 as discovery,
    flowcontrol::v1 as flowcontrol, networking::v1 as networking, resource::v1 as resource,
    scheduling::v1 as scheduling, scheduling::v1alpha2::PodGroupSpec, storage::v1 as storage,
};
use machinery::ObjectMeta;

/// The columns of a kind; name and creation time where the table does not know it.
pub(crate) fn of<T: k8s_openapi::Resource>() -> Vec<Column> {
    let row =
        COLUMNS.iter().find(|(version, kind, _)| (*version, *kind) == (T::API_VERSION, T::KIND));
    row.map_or_else(|| vec![NAME_COLUMN, CREATED_AT_COLUMN], |(.., columns)| columns())
}

fn text(name: &'static str, kind: &'static str, description: &'static str) -> Column {
    Column {
        name: Cow::Borrowed(name),
        kind: Cow::Borrowed(kind),
        format: Cow::Borrowed(""),
        description: Doc::Text(Cow::Borrowed(description)),
        priority: 0,
    }
}

fn doc<T: JsonSchema>(name: &'static str, kind: &'static str, field: &'static str) -> Column {
    Column { description: Doc::Field(describe::<T>, field), ..text(name, kind, "") }
}

fn age() -> Column {
    doc::<ObjectMeta>("Age", "string", "creationTimestamp")
}

trait Marked {
    /// Only `-o wide` shows it.
    fn wide(self) -> Self;
    /// Clients take it for the object's name.
    fn named(self) -> Self;
}

impl Marked for Column {
    fn wide(mut self) -> Self {
        self.priority = 1;
        self
    }

    fn named(mut self) -> Self {
        self.format = Cow::Borrowed("name");
        self
    }
}

type Row = (&'static str, &'static str, fn() -> Vec<Column>);

const COLUMNS: &[Row] = &[
    ("certificates.k8s.io/v1beta1", "ClusterTrustBundle", || {
        vec![
            NAME_COLUMN,
            doc::<trust::ClusterTrustBundleSpec>("SignerName", "string", "signerName"),
        ]
    }),
    ("certificates.k8s.io/v1beta1", "PodCertificateRequest", || {
        let spec = doc::<trust::PodCertificateRequestSpec>;
        vec![
            NAME_COLUMN,
            spec("PodName", "string", "podName"),
            spec("ServiceAccountName", "string", "serviceAccountName"),
            spec("NodeName", "string", "nodeName"),
            spec("SignerName", "string", "signerName"),
            text("State", "string", "Is the request Pending, Issued, Denied, or Failed?"),
            spec("UnverifiedUserAnnotations", "string", "unverifiedUserAnnotations"),
        ]
    }),
    ("coordination.k8s.io/v1beta1", "LeaseCandidate", || {
        vec![
            NAME_COLUMN,
            doc::<LeaseCandidateSpec>("LeaseName", "string", "leaseName"),
            text("BinaryVersion", "string", ""),
            text("EmulationVersion", "string", ""),
            age(),
        ]
    }),
    ("internal.apiserver.k8s.io/v1alpha1", "StorageVersion", || {
        let status = doc::<StorageVersionStatus>;
        vec![
            NAME_COLUMN,
            status("CommonEncodingVersion", "string", "commonEncodingVersion"),
            status("StorageVersions", "string", "storageVersions"),
            age(),
        ]
    }),
    ("resource.k8s.io/v1alpha3", "DeviceTaintRule", || {
        let taint = doc::<resource::DeviceTaint>;
        vec![
            NAME_COLUMN,
            taint("Key", "string", "key"),
            taint("Value", "string", "value"),
            taint("Effect", "string", "effect"),
            taint("TimeAdded", "string", "timeAdded"),
            age(),
        ]
    }),
    ("resource.k8s.io/v1alpha3", "ResourcePoolStatusRequest", || {
        vec![
            NAME_COLUMN,
            text("Driver", "string", "The driver to query pools for."),
            text("Total", "string", "Total number of devices across all pools."),
            text("Available", "string", "Number of available devices across all pools."),
            text("Allocated", "string", "Number of allocated devices across all pools."),
            text("Unavailable", "string", "Number of unavailable devices across all pools."),
            text("Errors", "string", "Number of pools with validation errors."),
            text("Pools", "integer", "Total number of matching pools."),
            text("Status", "string", "Processing status."),
            text("Completed", "string", "Time since the observation completed."),
        ]
    }),
    ("scheduling.k8s.io/v1alpha2", "PodGroup", || {
        vec![
            NAME_COLUMN,
            doc::<PodGroupSpec>("Policy", "string", "schedulingPolicy"),
            text("Workload", "string", "Name of the referenced Workload object"),
            text("Status", "string", "Status of the PodGroup"),
            age(),
        ]
    }),
    ("scheduling.k8s.io/v1alpha2", "Workload", || vec![NAME_COLUMN, age()]),
    ("apiregistration.k8s.io/v1", "APIService", || {
        vec![
            NAME_COLUMN,
            text("Service", "string", "The reference to the service that hosts this API endpoint."),
            text("Available", "string", "Whether this service is available."),
            age(),
        ]
    }),
    ("certificates.k8s.io/v1", "CertificateSigningRequest", || {
        vec![
            NAME_COLUMN,
            age(),
            text(
                "SignerName",
                "string",
                "Requested signer for the request. It is a qualified name in the form: `scope-hostname.io/name`. If empty, it will be defaulted:\n 1. If it's a kubelet client certificate, it is assigned\n    \"kubernetes.io/kube-apiserver-client-kubelet\".\n 2. If it's a kubelet serving certificate, it is assigned\n    \"kubernetes.io/kubelet-serving\".\n 3. Otherwise, it is assigned \"kubernetes.io/legacy-unknown\".\nDistribution of trust for signers happens out of band. You can select on this field using `spec.signerName`.",
            ),
            text("Requestor", "string", "Base64-encoded PKCS#10 CSR data"),
            doc::<certificates::CertificateSigningRequestSpec>(
                "RequestedDuration",
                "string",
                "expirationSeconds",
            ),
            text(
                "Condition",
                "string",
                "Conditions applied to the request, such as approval or denial.",
            ),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "Role",
                "string",
                "RoleRef can only reference a ClusterRole in the global namespace. If the RoleRef cannot be resolved, the Authorizer must return an error.",
            ),
            age(),
            text("Users", "string", "Users in the clusterRoleBinding").wide(),
            text("Groups", "string", "Groups in the clusterRoleBinding").wide(),
            text("ServiceAccounts", "string", "ServiceAccounts in the clusterRoleBinding").wide(),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "ClusterRole", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("v1", "ComponentStatus", || {
        vec![
            NAME_COLUMN,
            text("Status", "string", "Status of the component conditions"),
            text("Message", "string", "Message of the component conditions"),
            text("Error", "string", "Error of the component conditions"),
        ]
    }),
    ("v1", "ConfigMap", || {
        vec![NAME_COLUMN, doc::<core::ConfigMap>("Data", "string", "data"), age()]
    }),
    ("apps/v1", "ControllerRevision", || {
        vec![
            NAME_COLUMN,
            text("Controller", "string", "Controller of the object"),
            doc::<apps::ControllerRevision>("Revision", "string", "revision"),
            age(),
        ]
    }),
    ("batch/v1", "CronJob", || {
        vec![
            NAME_COLUMN,
            doc::<batch::CronJobSpec>("Schedule", "string", "schedule"),
            doc::<batch::CronJobSpec>("Timezone", "string", "timeZone"),
            doc::<batch::CronJobSpec>("Suspend", "boolean", "suspend"),
            doc::<batch::CronJobStatus>("Active", "integer", "active"),
            doc::<batch::CronJobStatus>("Last Schedule", "string", "lastScheduleTime"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc::<batch::JobSpec>("Selector", "string", "selector").wide(),
        ]
    }),
    ("storage.k8s.io/v1", "CSIDriver", || {
        vec![
            NAME_COLUMN,
            doc::<storage::CSIDriverSpec>("AttachRequired", "boolean", "attachRequired"),
            doc::<storage::CSIDriverSpec>("PodInfoOnMount", "boolean", "podInfoOnMount"),
            doc::<storage::CSIDriverSpec>("StorageCapacity", "boolean", "storageCapacity"),
            doc::<storage::CSIDriverSpec>("TokenRequests", "string", "tokenRequests"),
            doc::<storage::CSIDriverSpec>("RequiresRepublish", "boolean", "requiresRepublish"),
            doc::<storage::CSIDriverSpec>("Modes", "string", "volumeLifecycleModes"),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "CSINode", || {
        vec![
            NAME_COLUMN,
            text(
                "Drivers",
                "integer",
                "Drivers indicates the number of CSI drivers registered on the node",
            ),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "CSIStorageCapacity", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("apps/v1", "DaemonSet", || {
        vec![
            NAME_COLUMN,
            doc::<apps::DaemonSetStatus>("Desired", "integer", "desiredNumberScheduled"),
            doc::<apps::DaemonSetStatus>("Current", "integer", "currentNumberScheduled"),
            doc::<apps::DaemonSetStatus>("Ready", "integer", "numberReady"),
            doc::<apps::DaemonSetStatus>("Up-to-date", "integer", "updatedNumberScheduled"),
            doc::<apps::DaemonSetStatus>("Available", "integer", "numberAvailable"),
            doc::<core::PodSpec>("Node Selector", "string", "nodeSelector"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc::<apps::DaemonSetSpec>("Selector", "string", "selector").wide(),
        ]
    }),
    ("apps/v1", "Deployment", || {
        vec![
            NAME_COLUMN,
            text("Ready", "string", "Number of the pod with ready state"),
            doc::<apps::DeploymentStatus>("Up-to-date", "string", "updatedReplicas"),
            doc::<apps::DeploymentStatus>("Available", "string", "availableReplicas"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc::<apps::DeploymentSpec>("Selector", "string", "selector").wide(),
        ]
    }),
    ("resource.k8s.io/v1", "DeviceClass", || vec![NAME_COLUMN, age()]),
    ("v1", "Endpoints", || {
        vec![NAME_COLUMN, doc::<core::Endpoints>("Endpoints", "string", "subsets"), age()]
    }),
    ("discovery.k8s.io/v1", "EndpointSlice", || {
        vec![
            NAME_COLUMN,
            doc::<discovery::EndpointSlice>("AddressType", "string", "addressType"),
            doc::<discovery::EndpointSlice>("Ports", "string", "ports"),
            doc::<discovery::EndpointSlice>("Endpoints", "string", "endpoints"),
            age(),
        ]
    }),
    ("v1", "Event", || {
        vec![
            doc::<core::Event>("Last Seen", "string", "lastTimestamp"),
            doc::<core::Event>("Type", "string", "type"),
            doc::<core::Event>("Reason", "string", "reason"),
            doc::<core::Event>("Object", "string", "involvedObject"),
            doc::<core::ObjectReference>("Subobject", "string", "fieldPath").wide(),
            doc::<core::Event>("Source", "string", "source").wide(),
            doc::<core::Event>("Message", "string", "message"),
            doc::<core::Event>("First Seen", "string", "firstTimestamp").wide(),
            doc::<core::Event>("Count", "string", "count").wide(),
            doc::<ObjectMeta>("Name", "string", "name").named().wide(),
        ]
    }),
    ("flowcontrol.apiserver.k8s.io/v1", "FlowSchema", || {
        vec![
            NAME_COLUMN,
            doc::<flowcontrol::PriorityLevelConfigurationReference>(
                "PriorityLevel",
                "string",
                "name",
            ),
            doc::<flowcontrol::FlowSchemaSpec>(
                "MatchingPrecedence",
                "string",
                "matchingPrecedence",
            ),
            doc::<flowcontrol::FlowSchemaSpec>(
                "DistinguisherMethod",
                "string",
                "distinguisherMethod",
            ),
            age(),
            text(
                "MissingPL",
                "string",
                "references a broken or non-existent PriorityLevelConfiguration",
            ),
        ]
    }),
    ("autoscaling/v2", "HorizontalPodAutoscaler", || {
        vec![
            NAME_COLUMN,
            doc::<autoscaling_v2::HorizontalPodAutoscalerSpec>(
                "Reference",
                "string",
                "scaleTargetRef",
            ),
            doc::<autoscaling_v2::HorizontalPodAutoscalerSpec>("Targets", "string", "metrics"),
            doc::<autoscaling_v2::HorizontalPodAutoscalerSpec>("MinPods", "string", "minReplicas"),
            doc::<autoscaling_v2::HorizontalPodAutoscalerSpec>("MaxPods", "string", "maxReplicas"),
            doc::<autoscaling_v2::HorizontalPodAutoscalerStatus>(
                "Replicas",
                "string",
                "currentReplicas",
            ),
            age(),
        ]
    }),
    ("networking.k8s.io/v1", "IngressClass", || {
        vec![
            NAME_COLUMN,
            text("Controller", "string", "Controller that is responsible for handling this class"),
            text("Parameters", "string", "A reference to a resource with additional parameters"),
            age(),
        ]
    }),
    ("networking.k8s.io/v1", "Ingress", || {
        vec![
            NAME_COLUMN,
            text(
                "Class",
                "string",
                "The name of the IngressClass resource that should be used for additional configuration",
            ),
            text(
                "Hosts",
                "string",
                "Hosts that incoming requests are matched against before the ingress rule",
            ),
            text(
                "Address",
                "string",
                "Address is a list containing ingress points for the load-balancer",
            ),
            text("Ports", "string", "Ports of TLS configurations that open"),
            age(),
        ]
    }),
    ("networking.k8s.io/v1", "IPAddress", || {
        vec![NAME_COLUMN, doc::<networking::IPAddressSpec>("ParentRef", "string", "parentRef")]
    }),
    ("batch/v1", "Job", || {
        vec![
            NAME_COLUMN,
            text("Status", "string", "Status of the job."),
            doc::<batch::JobStatus>("Completions", "string", "succeeded"),
            text("Duration", "string", "Time required to complete the job."),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc::<batch::JobSpec>("Selector", "string", "selector").wide(),
        ]
    }),
    ("coordination.k8s.io/v1", "Lease", || {
        vec![
            NAME_COLUMN,
            doc::<coordination::LeaseSpec>("Holder", "string", "holderIdentity"),
            age(),
        ]
    }),
    ("v1", "LimitRange", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy", || {
        vec![
            NAME_COLUMN,
            text(
                "Mutations",
                "integer",
                "Mutation indicates the number of mutations rules defined in this configuration",
            ),
            text(
                "ParamKind",
                "string",
                "ParamKind specifies the kind of resources used to parameterize this policy",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicyBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "PolicyName",
                "string",
                "PolicyName indicates the policy definition which the policy binding binded to",
            ),
            text(
                "ParamRef",
                "string",
                "ParamRef indicates the param resource which sets the configuration param",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", || {
        vec![
            NAME_COLUMN,
            text(
                "Webhooks",
                "integer",
                "Webhooks indicates the number of webhooks registered in this configuration",
            ),
            age(),
        ]
    }),
    ("v1", "Namespace", || {
        vec![NAME_COLUMN, text("Status", "string", "The status of the namespace"), age()]
    }),
    ("networking.k8s.io/v1", "NetworkPolicy", || {
        vec![
            NAME_COLUMN,
            doc::<networking::NetworkPolicySpec>("Pod-Selector", "string", "podSelector"),
            age(),
        ]
    }),
    ("v1", "Node", || {
        vec![
            NAME_COLUMN,
            text("Status", "string", "The status of the node"),
            text("Roles", "string", "The roles of the node"),
            age(),
            doc::<core::NodeSystemInfo>("Version", "string", "kubeletVersion"),
            doc::<core::NodeStatus>("Internal-IP", "string", "addresses").wide(),
            doc::<core::NodeStatus>("External-IP", "string", "addresses").wide(),
            doc::<core::NodeSystemInfo>("OS-Image", "string", "osImage").wide(),
            doc::<core::NodeSystemInfo>("Kernel-Version", "string", "kernelVersion").wide(),
            doc::<core::NodeSystemInfo>("Container-Runtime", "string", "containerRuntimeVersion")
                .wide(),
        ]
    }),
    ("v1", "PersistentVolumeClaim", || {
        vec![
            NAME_COLUMN,
            doc::<core::PersistentVolumeClaimStatus>("Status", "string", "phase"),
            doc::<core::PersistentVolumeClaimSpec>("Volume", "string", "volumeName"),
            doc::<core::PersistentVolumeClaimStatus>("Capacity", "string", "capacity"),
            doc::<core::PersistentVolumeClaimStatus>("Access Modes", "string", "accessModes"),
            text("StorageClass", "string", "StorageClass of the pvc"),
            text("VolumeAttributesClass", "string", "VolumeAttributesClass of the pvc"),
            age(),
            doc::<core::PersistentVolumeClaimSpec>("VolumeMode", "string", "volumeMode").wide(),
        ]
    }),
    ("v1", "PersistentVolume", || {
        vec![
            NAME_COLUMN,
            doc::<core::PersistentVolumeSpec>("Capacity", "string", "capacity"),
            doc::<core::PersistentVolumeSpec>("Access Modes", "string", "accessModes"),
            doc::<core::PersistentVolumeSpec>(
                "Reclaim Policy",
                "string",
                "persistentVolumeReclaimPolicy",
            ),
            doc::<core::PersistentVolumeStatus>("Status", "string", "phase"),
            doc::<core::PersistentVolumeSpec>("Claim", "string", "claimRef"),
            text("StorageClass", "string", "StorageClass of the pv"),
            text("VolumeAttributesClass", "string", "VolumeAttributesClass of the pv"),
            doc::<core::PersistentVolumeStatus>("Reason", "string", "reason"),
            age(),
            doc::<core::PersistentVolumeSpec>("VolumeMode", "string", "volumeMode").wide(),
        ]
    }),
    ("policy/v1", "PodDisruptionBudget", || {
        vec![
            NAME_COLUMN,
            text("Min Available", "string", "The minimum number of pods that must be available."),
            text(
                "Max Unavailable",
                "string",
                "The maximum number of pods that may be unavailable.",
            ),
            text(
                "Allowed Disruptions",
                "integer",
                "Calculated number of pods that may be disrupted at this time.",
            ),
            age(),
        ]
    }),
    ("v1", "Pod", || {
        vec![
            NAME_COLUMN,
            text(
                "Ready",
                "string",
                "The aggregate readiness state of this pod for accepting traffic.",
            ),
            text("Status", "string", "The aggregate status of the containers in this pod."),
            text(
                "Restarts",
                "string",
                "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted.",
            ),
            age(),
            doc::<core::PodStatus>("IP", "string", "podIP").wide(),
            doc::<core::PodSpec>("Node", "string", "nodeName").wide(),
            doc::<core::PodStatus>("Nominated Node", "string", "nominatedNodeName").wide(),
            doc::<core::PodSpec>("Readiness Gates", "string", "readinessGates").wide(),
        ]
    }),
    ("v1", "PodTemplate", || {
        vec![
            NAME_COLUMN,
            text("Containers", "string", "Names of each container in the template."),
            text("Images", "string", "Images referenced by each container in the template."),
            text("Pod Labels", "string", "The labels for the pod template."),
        ]
    }),
    ("scheduling.k8s.io/v1", "PriorityClass", || {
        vec![
            NAME_COLUMN,
            doc::<scheduling::PriorityClass>("Value", "integer", "value"),
            doc::<scheduling::PriorityClass>("Global-Default", "boolean", "globalDefault"),
            age(),
            doc::<scheduling::PriorityClass>("PreemptionPolicy", "string", "preemptionPolicy"),
        ]
    }),
    ("flowcontrol.apiserver.k8s.io/v1", "PriorityLevelConfiguration", || {
        vec![
            NAME_COLUMN,
            doc::<flowcontrol::PriorityLevelConfigurationSpec>("Type", "string", "type"),
            doc::<flowcontrol::LimitedPriorityLevelConfiguration>(
                "NominalConcurrencyShares",
                "string",
                "nominalConcurrencyShares",
            ),
            doc::<flowcontrol::QueuingConfiguration>("Queues", "string", "queues"),
            doc::<flowcontrol::QueuingConfiguration>("HandSize", "string", "handSize"),
            doc::<flowcontrol::QueuingConfiguration>(
                "QueueLengthLimit",
                "string",
                "queueLengthLimit",
            ),
            age(),
        ]
    }),
    ("apps/v1", "ReplicaSet", || {
        vec![
            NAME_COLUMN,
            doc::<apps::ReplicaSetSpec>("Desired", "integer", "replicas"),
            doc::<apps::ReplicaSetStatus>("Current", "integer", "replicas"),
            doc::<apps::ReplicaSetStatus>("Ready", "integer", "readyReplicas"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc::<apps::ReplicaSetSpec>("Selector", "string", "selector").wide(),
        ]
    }),
    ("v1", "ReplicationController", || {
        vec![
            NAME_COLUMN,
            doc::<core::ReplicationControllerSpec>("Desired", "integer", "replicas"),
            doc::<core::ReplicationControllerStatus>("Current", "integer", "replicas"),
            doc::<core::ReplicationControllerStatus>("Ready", "integer", "readyReplicas"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc::<core::ReplicationControllerSpec>("Selector", "string", "selector").wide(),
        ]
    }),
    ("resource.k8s.io/v1", "ResourceClaim", || {
        vec![
            NAME_COLUMN,
            text(
                "State",
                "string",
                "A summary of the current state (allocated, pending, reserved, etc.).",
            ),
            age(),
        ]
    }),
    ("resource.k8s.io/v1", "ResourceClaimTemplate", || vec![NAME_COLUMN, age()]),
    ("v1", "ResourceQuota", || {
        vec![
            NAME_COLUMN,
            text(
                "Request",
                "string",
                "Request represents a minimum amount of cpu/memory that a container may consume.",
            ),
            text(
                "Limit",
                "string",
                "Limits control the maximum amount of cpu/memory that a container may use independent of contention on the node.",
            ),
            age(),
        ]
    }),
    ("resource.k8s.io/v1", "ResourceSlice", || {
        vec![
            NAME_COLUMN,
            doc::<resource::ResourceSliceSpec>("Node", "string", "nodeName"),
            doc::<resource::ResourceSliceSpec>("Driver", "string", "driver"),
            doc::<resource::ResourcePool>("Pool", "string", "name"),
            age(),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "Role",
                "string",
                "RoleRef can reference a Role in the current namespace or a ClusterRole in the global namespace. If the RoleRef cannot be resolved, the Authorizer must return an error.",
            ),
            age(),
            text("Users", "string", "Users in the roleBinding").wide(),
            text("Groups", "string", "Groups in the roleBinding").wide(),
            text("ServiceAccounts", "string", "ServiceAccounts in the roleBinding").wide(),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "Role", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("node.k8s.io/v1", "RuntimeClass", || vec![NAME_COLUMN, text("Handler", "string", ""), age()]),
    ("v1", "Secret", || {
        vec![
            NAME_COLUMN,
            doc::<core::Secret>("Type", "string", "type"),
            doc::<core::Secret>("Data", "string", "data"),
            age(),
        ]
    }),
    ("v1", "ServiceAccount", || vec![NAME_COLUMN, age()]),
    ("networking.k8s.io/v1", "ServiceCIDR", || {
        vec![NAME_COLUMN, doc::<networking::ServiceCIDRSpec>("CIDRs", "string", "cidrs"), age()]
    }),
    ("v1", "Service", || {
        vec![
            NAME_COLUMN,
            doc::<core::ServiceSpec>("Type", "string", "type"),
            doc::<core::ServiceSpec>("Cluster-IP", "string", "clusterIP"),
            doc::<core::ServiceSpec>("External-IP", "string", "externalIPs"),
            doc::<core::ServiceSpec>("Port(s)", "string", "ports"),
            age(),
            doc::<core::ServiceSpec>("Selector", "string", "selector").wide(),
        ]
    }),
    ("apps/v1", "StatefulSet", || {
        vec![
            NAME_COLUMN,
            text("Ready", "string", "Number of the pod with ready state"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
        ]
    }),
    ("storagemigration.k8s.io/v1beta1", "StorageVersionMigration", || {
        vec![
            NAME_COLUMN,
            text("Resource", "string", "GroupResource to migrate"),
            text("Status", "string", "Status of the migration"),
        ]
    }),
    ("storage.k8s.io/v1", "StorageClass", || {
        vec![
            NAME_COLUMN,
            doc::<storage::StorageClass>("Provisioner", "string", "provisioner"),
            doc::<storage::StorageClass>("ReclaimPolicy", "string", "reclaimPolicy"),
            doc::<storage::StorageClass>("VolumeBindingMode", "string", "volumeBindingMode"),
            doc::<storage::StorageClass>("AllowVolumeExpansion", "string", "allowVolumeExpansion"),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", || {
        vec![
            NAME_COLUMN,
            text(
                "Validations",
                "integer",
                "Validations indicates the number of validation rules defined in this configuration",
            ),
            text(
                "ParamKind",
                "string",
                "ParamKind specifies the kind of resources used to parameterize this policy",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "PolicyName",
                "string",
                "PolicyName indicates the policy definition which the policy binding binded to",
            ),
            text(
                "ParamRef",
                "string",
                "ParamRef indicates the param resource which sets the configuration param",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", || {
        vec![
            NAME_COLUMN,
            text(
                "Webhooks",
                "integer",
                "Webhooks indicates the number of webhooks registered in this configuration",
            ),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "VolumeAttachment", || {
        vec![
            NAME_COLUMN,
            doc::<storage::VolumeAttachmentSpec>("Attacher", "string", "attacher").named(),
            doc::<storage::VolumeAttachmentSource>("PV", "string", "persistentVolumeName"),
            doc::<storage::VolumeAttachmentSpec>("Node", "string", "nodeName"),
            doc::<storage::VolumeAttachmentStatus>("Attached", "boolean", "attached"),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "VolumeAttributesClass", || {
        vec![
            NAME_COLUMN,
            doc::<storage::VolumeAttributesClass>("DriverName", "string", "driverName"),
            age(),
        ]
    }),
];

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const GOLDEN: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/spec/golden/tables.json");

    /// Upstream's own columns, where they lie beside the repository.
    #[test]
    fn columns_are_upstreams() {
        let Ok(text) = std::fs::read_to_string(GOLDEN) else {
            println!("skipped: no {GOLDEN}");
            return;
        };
        let golden: Value = serde_json::from_str(&text).expect("JSON");
        let mut checked = 0;
        // The server that was asked was not told to serve more.
        let table = crate::tests::by_default();
        for row in table.iter().filter(|row| row.storage.is_some()) {
            let name = if row.group.is_empty() {
                format!("{}.{}", row.plural, row.version)
            } else {
                format!("{}.{}.{}", row.plural, row.version, row.group)
            };
            let columns: Vec<Value> = row.strategy.columns().iter().map(shown).collect();
            assert_eq!(Value::from(columns), golden[&name], "{name}");
            checked += 1;
        }
        assert!(checked > 50);
    }

    fn shown(column: &Column) -> Value {
        serde_json::json!({
            "name": column.name, "type": column.kind, "format": column.format,
            "description": column.description.text(), "priority": column.priority,
        })
    }
}
