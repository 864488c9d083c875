//! The table of feature gates: upstream's names, stages and defaults, and what each does here.
//!
//! A row: name, stage, default (locked gates keep it), [`Effect`]. What is
//! known of a gate stands here and nowhere else; a new gate is a line.

use super::{Effect, Spec, Stage, State};

macro_rules! gates {
    ($($name:ident: $stage:ident $state:ident $effect:ident;)*) => {
        /// A gate. The names are upstream's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Feature {
            $($name,)*
        }

        /// In the order of the names, which is that of [`Feature`].
        pub(super) const TABLE: &[(Feature, Spec)] = &[
            $((Feature::$name, Spec {
                name: stringify!($name),
                stage: Stage::$stage,
                state: State::$state,
                effect: Effect::$effect,
            }),)*
        ];
    };
}

gates! {
    APIResponseCompression: Beta On Decides;
    APIServerIdentity: Beta On Decides;
    APIServerTracing: Stable LockedOn Absent;
    APIServingWithRoutine: Alpha Off Absent;
    AggregatedDiscoveryRemoveBetaType: Deprecated LockedOn BuiltIn;
    AllAlpha: Alpha Off Decides;
    AllBeta: Beta Off Decides;
    AllowDNSOnlyNodeCSR: Deprecated Off Absent;
    AllowInsecureKubeletCertificateSigningRequests: Deprecated Off Absent;
    AllowOverwriteTerminationGracePeriodSeconds: Deprecated LockedOff Absent;
    AllowParsingUserUIDFromCertAuth: Beta On Decides;
    AllowServiceExternalIPs: Stable On Decides;
    AllowUnsafeMalformedObjectDeletion: Alpha Off Absent;
    AnonymousAuthConfigurableEndpoints: Stable LockedOn BuiltIn;
    AnyVolumeDataSource: Stable LockedOn BuiltIn;
    AtomicFIFO: Beta On Absent;
    AuthorizeNodeWithSelectors: Stable LockedOn BuiltIn;
    AuthorizePodWebsocketUpgradeCreatePermission: Beta On Decides;
    AuthorizeWithSelectors: Stable LockedOn BuiltIn;
    BtreeWatchCache: Stable LockedOn BuiltIn;
    CBORServingAndStorage: Alpha Off Decides;
    CPUCFSQuotaPeriod: Stable On Absent;
    CPUManagerPolicyAlphaOptions: Alpha Off Absent;
    CPUManagerPolicyBetaOptions: Beta On Absent;
    CPUManagerPolicyOptions: Stable LockedOn Absent;
    CRDObservedGenerationTracking: Beta On BuiltIn;
    CRDValidationRatcheting: Stable LockedOn BuiltIn;
    CRIListStreaming: Alpha Off Absent;
    CSIServiceAccountTokenSecrets: Stable LockedOn BuiltIn;
    CSIVolumeHealth: Alpha Off Absent;
    ChangeContainerStatusOnKubeletRestart: Deprecated Off Absent;
    ClearingNominatedNodeNameAfterBinding: Beta On Absent;
    ClientsAllowCARotation: Beta On Absent;
    ClientsAllowCBOR: Alpha Off Absent;
    ClientsAllowTLSCacheGC: Beta On Absent;
    ClientsPreferCBOR: Alpha Off Absent;
    CloudControllerManagerWatchBasedRoutesReconciliation: Alpha Off Absent;
    CloudControllerManagerWebhook: Alpha Off Absent;
    ClusterTrustBundle: Beta Off Fields;
    ClusterTrustBundleProjection: Beta Off Fields;
    ComponentFlagz: Beta On Decides;
    ComponentStatusz: Beta On Decides;
    ConcurrentWatchObjectDecode: Beta Off Absent;
    ConsistentListFromCache: Stable LockedOn BuiltIn;
    ConstrainedImpersonation: Beta On Decides;
    ContainerCheckpoint: Beta On Absent;
    ContainerRestartRules: Beta On Decides;
    ContainerStopSignals: Alpha Off Decides;
    ContextualLogging: Beta On Absent;
    ControllerManagerReleaseLeaderElectionLockOnExit: Alpha Off Absent;
    CoordinatedLeaderElection: Beta Off Fields;
    CrossNamespaceVolumeDataSource: Alpha Off Fields;
    CustomResourceFieldSelectors: Stable LockedOn BuiltIn;
    DRAAdminAccess: Stable LockedOn BuiltIn;
    DRAConsumableCapacity: Beta On Decides;
    DRADeviceBindingConditions: Beta On Decides;
    DRADeviceTaintRules: Beta Off Absent;
    DRADeviceTaints: Beta On Decides;
    DRAExtendedResource: Beta On Decides;
    DRAListTypeAttributes: Alpha Off Fields;
    DRANodeAllocatableResources: Alpha Off Fields;
    DRAPartitionableDevices: Beta On Decides;
    DRAPrioritizedList: Stable On Decides;
    DRAResourceClaimDeviceStatus: Beta On Decides;
    DRAResourceClaimGranularStatusAuthorization: Beta On Absent;
    DRAResourcePoolStatus: Alpha Off Absent;
    DRASchedulerFilterTimeout: Beta On Absent;
    DRAWorkloadResourceClaims: Alpha Off Fields;
    DeclarativeValidation: Stable LockedOn BuiltIn;
    DeclarativeValidationBeta: Beta On Absent;
    DeclarativeValidationTakeover: Deprecated Off Absent;
    DeploymentReplicaSetTerminatingReplicas: Beta On Decides;
    DetectCacheInconsistency: Beta On Absent;
    DisableAllocatorDualWrite: Stable LockedOn BuiltIn;
    DisableCPUQuotaWithExclusiveCPUs: Deprecated On Absent;
    DisableNodeKubeProxyVersion: Deprecated LockedOn BuiltIn;
    DynamicResourceAllocation: Stable LockedOn BuiltIn;
    EnvFiles: Beta On Decides;
    EventedPLEG: Alpha Off Absent;
    ExecProbeTimeout: Stable LockedOn BuiltIn;
    ExtendWebSocketsToKubelet: Beta On Absent;
    ExternalServiceAccountTokenSigner: Stable LockedOn Absent;
    GangScheduling: Alpha Off Absent;
    GenericWorkload: Alpha Off Fields;
    GitRepoVolumeDriver: Deprecated LockedOff Absent;
    GracefulNodeShutdown: Beta On Decides;
    GracefulNodeShutdownBasedOnPodPriority: Beta On Absent;
    HPAConfigurableTolerance: Beta On Decides;
    HPAScaleToZero: Alpha Off Decides;
    HostnameOverride: Beta On Decides;
    ImageMaximumGCAge: Stable LockedOn Absent;
    ImageVolume: Stable LockedOn BuiltIn;
    ImageVolumeWithDigest: Alpha Off Fields;
    InOrderInformers: Stable LockedOn BuiltIn;
    InOrderInformersBatchProcess: Beta On Absent;
    InPlacePodLevelResourcesVerticalScaling: Beta On Decides;
    InPlacePodVerticalScaling: Stable LockedOn BuiltIn;
    InPlacePodVerticalScalingExclusiveCPUs: Alpha Off Absent;
    InPlacePodVerticalScalingExclusiveMemory: Alpha Off Absent;
    InPlacePodVerticalScalingInitContainers: Beta On Absent;
    InformerResourceVersion: Stable On BuiltIn;
    JobBackoffLimitPerIndex: Stable LockedOn BuiltIn;
    JobManagedBy: Stable LockedOn BuiltIn;
    JobPodReplacementPolicy: Stable LockedOn BuiltIn;
    JobSuccessPolicy: Stable LockedOn BuiltIn;
    KMSv1: Deprecated Off Absent;
    KubeletCgroupDriverFromCRI: Stable LockedOn BuiltIn;
    KubeletCrashLoopBackOffMax: Beta On Absent;
    KubeletEnsureSecretPulledImages: Beta On Absent;
    KubeletFineGrainedAuthz: Stable LockedOn BuiltIn;
    KubeletInUserNamespace: Alpha Off Absent;
    KubeletPSI: Stable LockedOn Absent;
    KubeletPodResourcesDynamicResources: Stable LockedOn BuiltIn;
    KubeletPodResourcesGet: Stable LockedOn BuiltIn;
    KubeletPodResourcesListUseActivePods: Deprecated On BuiltIn;
    KubeletRegistrationGetOnExistsOnly: Deprecated Off Absent;
    KubeletSeparateDiskGC: Beta On Absent;
    KubeletServiceAccountTokenForCredentialProviders: Beta On Absent;
    KubeletTracing: Stable LockedOn Absent;
    ListFromCacheSnapshot: Beta On BuiltIn;
    LocalStorageCapacityIsolationFSQuotaMonitoring: Beta Off Absent;
    LogarithmicScaleDown: Stable LockedOn BuiltIn;
    LoggingAlphaOptions: Alpha Off Absent;
    LoggingBetaOptions: Beta On Absent;
    ManifestBasedAdmissionControlConfig: Alpha Off Absent;
    MatchLabelKeysInPodAffinity: Stable LockedOn BuiltIn;
    MatchLabelKeysInPodTopologySpread: Beta On Decides;
    MatchLabelKeysInPodTopologySpreadSelectorMerge: Beta On Decides;
    MaxUnavailableStatefulSet: Beta Off Decides;
    MemoryQoS: Alpha Off Absent;
    MultiCIDRServiceAllocator: Stable LockedOn BuiltIn;
    MutableCSINodeAllocatableCount: Stable LockedOn BuiltIn;
    MutablePVNodeAffinity: Alpha Off Absent;
    MutablePodResourcesForSuspendedJobs: Beta On BuiltIn;
    MutableSchedulingDirectivesForSuspendedJobs: Beta On BuiltIn;
    MutatingAdmissionPolicy: Stable On Decides;
    NFTablesProxyMode: Stable LockedOn BuiltIn;
    NativeHistograms: Alpha Off Absent;
    NodeDeclaredFeatures: Beta On Decides;
    NodeInclusionPolicyInPodTopologySpread: Stable LockedOn BuiltIn;
    NodeLogQuery: Stable LockedOn Absent;
    NodeSwap: Stable LockedOn Absent;
    NominatedNodeNameForExpectation: Beta On Absent;
    OpenAPIEnums: Beta On BuiltIn;
    OpportunisticBatching: Beta On Absent;
    OrderedNamespaceDeletion: Stable LockedOn BuiltIn;
    PLEGOnDemandRelist: Beta On Absent;
    PersistentVolumeClaimUnusedSinceTime: Alpha Off Absent;
    PodAndContainerStatsFromCRI: Alpha Off Absent;
    PodCertificateRequest: Beta Off Fields;
    PodDeletionCost: Beta On Decides;
    PodLevelResourceManagers: Alpha Off Absent;
    PodLevelResources: Beta On Decides;
    PodLifecycleSleepAction: Stable LockedOn BuiltIn;
    PodLifecycleSleepActionAllowZero: Stable LockedOn BuiltIn;
    PodLogsQuerySplitStreams: Alpha Off Decides;
    PodObservedGenerationTracking: Stable LockedOn BuiltIn;
    PodReadyToStartContainersCondition: Beta On Decides;
    PodSchedulingReadiness: Stable LockedOn BuiltIn;
    PodTopologyLabelsAdmission: Beta On Decides;
    PodsAPI: Alpha Off Absent;
    PortForwardWebsockets: Beta On BuiltIn;
    PreferSameTrafficDistribution: Stable LockedOn BuiltIn;
    PreventStaticPodAPIReferences: Beta On Absent;
    ProcMountType: Stable LockedOn BuiltIn;
    QOSReserved: Alpha Off Absent;
    RecoverVolumeExpansionFailure: Stable LockedOn BuiltIn;
    RecursiveReadOnlyMounts: Stable LockedOn BuiltIn;
    ReduceDefaultCrashLoopBackOffDecay: Alpha Off Decides;
    RelaxedDNSSearchValidation: Stable LockedOn BuiltIn;
    RelaxedEnvironmentVariableValidation: Stable LockedOn BuiltIn;
    RelaxedServiceNameValidation: Beta On Decides;
    ReloadKubeletClientCAFile: Beta On BuiltIn;
    ReloadKubeletServerCertificateFile: Beta On Absent;
    RemoteRequestHeaderUID: Beta On BuiltIn;
    ResilientWatchCacheInitialization: Stable LockedOn BuiltIn;
    ResourceHealthStatus: Beta On Decides;
    ResourceHealthStatusMessage: Beta On Fields;
    RestartAllContainersOnContainerExits: Beta On Decides;
    RetryGenerateName: Stable LockedOn BuiltIn;
    RotateKubeletServerCertificate: Beta On BuiltIn;
    RuntimeClassInImageCriAPI: Alpha Off Absent;
    SELinuxChangePolicy: Stable LockedOn BuiltIn;
    SELinuxMount: Beta Off Absent;
    SELinuxMountReadWriteOncePod: Stable LockedOn Absent;
    SchedulerAsyncAPICalls: Beta Off Absent;
    SchedulerAsyncPreemption: Beta On Absent;
    SchedulerPopFromBackoffQ: Beta On Absent;
    SchedulerQueueingHints: Stable LockedOn BuiltIn;
    SeparateCacheWatchRPC: Deprecated LockedOff Absent;
    SeparateTaintEvictionController: Stable LockedOn BuiltIn;
    ServiceAccountNodeAudienceRestriction: Beta On Decides;
    ServiceAccountTokenJTI: Stable LockedOn BuiltIn;
    ServiceAccountTokenNodeBinding: Stable LockedOn BuiltIn;
    ServiceAccountTokenNodeBindingValidation: Stable LockedOn BuiltIn;
    ServiceAccountTokenPodNodeInfo: Stable LockedOn BuiltIn;
    ServiceCIDRStatusFieldWiping: Deprecated On BuiltIn;
    ShardedListAndWatch: Alpha Off Absent;
    SidecarContainers: Stable LockedOn BuiltIn;
    SizeBasedListCostEstimate: Beta On Absent;
    StaleControllerConsistencyDaemonSet: Beta On Absent;
    StaleControllerConsistencyJob: Beta On Absent;
    StaleControllerConsistencyReplicaSet: Beta On Absent;
    StaleControllerConsistencyStatefulSet: Beta On Absent;
    StatefulSetSemanticRevisionComparison: Beta On Absent;
    StorageCapacityScoring: Alpha Off Absent;
    StorageNamespaceIndex: Deprecated On Absent;
    StorageVersionAPI: Alpha Off Decides;
    StorageVersionHash: Beta On Decides;
    StorageVersionMigrator: Beta Off Decides;
    StreamingCollectionEncodingToJSON: Stable LockedOn BuiltIn;
    StreamingCollectionEncodingToProtobuf: Stable LockedOn BuiltIn;
    StrictIPCIDRValidation: Beta On Decides;
    StructuredAuthenticationConfiguration: Stable LockedOn BuiltIn;
    StructuredAuthenticationConfigurationEgressSelector: Beta On Absent;
    StructuredAuthenticationConfigurationJWKSMetrics: Beta On Absent;
    SupplementalGroupsPolicy: Stable LockedOn BuiltIn;
    SystemdWatchdog: Stable LockedOn Absent;
    TaintTolerationComparisonOperators: Alpha Off Decides;
    TokenRequestServiceAccountUIDValidation: Beta On Decides;
    TopologyAwareWorkloadScheduling: Alpha Off Fields;
    TopologyManagerPolicyAlphaOptions: Alpha Off Absent;
    TopologyManagerPolicyBetaOptions: Beta On Absent;
    TopologyManagerPolicyOptions: Stable LockedOn BuiltIn;
    TranslateStreamCloseWebsocketRequests: Beta On BuiltIn;
    UnauthenticatedHTTP2DOSMitigation: Beta On Absent;
    UnknownVersionInteroperabilityProxy: Beta On Absent;
    UnlockWhileProcessingFIFO: Beta On Absent;
    UserNamespacesHostNetworkSupport: Alpha Off Absent;
    UserNamespacesSupport: Stable LockedOn BuiltIn;
    VolumeAttributesClass: Stable LockedOn BuiltIn;
    VolumeLimitScaling: Alpha Off Fields;
    WatchCacheInitializationPostStartHook: Beta On Absent;
    WatchList: Beta On Decides;
    WatchListClient: Beta On Absent;
    WinDSR: Stable LockedOn Absent;
    WinOverlay: Stable LockedOn Absent;
    WindowsCPUAndMemoryAffinity: Alpha Off Absent;
    WindowsGracefulNodeShutdown: Beta On Absent;
    WindowsHostNetwork: Deprecated Off Absent;
    WorkloadAwarePreemption: Alpha Off Fields;
    WorkloadWithJob: Alpha Off Absent;
}

use Feature as F;

/// What a gate that is open needs open beside it.
pub(super) const DEPENDENCIES: &[(Feature, &[Feature])] = &[
    (F::AuthorizeNodeWithSelectors, &[F::AuthorizeWithSelectors]),
    (F::ClusterTrustBundleProjection, &[F::ClusterTrustBundle]),
    (F::DRAAdminAccess, &[F::DynamicResourceAllocation]),
    (F::DRAConsumableCapacity, &[F::DynamicResourceAllocation]),
    (
        F::DRADeviceBindingConditions,
        &[F::DRAResourceClaimDeviceStatus, F::DynamicResourceAllocation],
    ),
    (F::DRADeviceTaintRules, &[F::DRADeviceTaints]),
    (F::DRADeviceTaints, &[F::DynamicResourceAllocation]),
    (F::DRAExtendedResource, &[F::DynamicResourceAllocation]),
    (F::DRAListTypeAttributes, &[F::DynamicResourceAllocation]),
    (F::DRANodeAllocatableResources, &[F::DynamicResourceAllocation]),
    (F::DRAPartitionableDevices, &[F::DynamicResourceAllocation]),
    (F::DRAPrioritizedList, &[F::DynamicResourceAllocation]),
    (
        F::DRAResourceClaimGranularStatusAuthorization,
        &[F::DRAResourceClaimDeviceStatus, F::DynamicResourceAllocation],
    ),
    (F::DRAResourcePoolStatus, &[F::DynamicResourceAllocation]),
    (F::DRASchedulerFilterTimeout, &[F::DynamicResourceAllocation]),
    (F::DRAWorkloadResourceClaims, &[F::DynamicResourceAllocation, F::GenericWorkload]),
    (F::DeclarativeValidationBeta, &[F::DeclarativeValidation]),
    (F::DeclarativeValidationTakeover, &[F::DeclarativeValidation]),
    (F::DisableAllocatorDualWrite, &[F::MultiCIDRServiceAllocator]),
    (F::ExtendWebSocketsToKubelet, &[F::NodeDeclaredFeatures]),
    (F::GangScheduling, &[F::GenericWorkload]),
    (F::GracefulNodeShutdownBasedOnPodPriority, &[F::GracefulNodeShutdown]),
    (F::ImageVolumeWithDigest, &[F::ImageVolume]),
    (
        F::InPlacePodLevelResourcesVerticalScaling,
        &[F::InPlacePodVerticalScaling, F::NodeDeclaredFeatures, F::PodLevelResources],
    ),
    (F::InPlacePodVerticalScalingExclusiveCPUs, &[F::InPlacePodVerticalScaling]),
    (F::InPlacePodVerticalScalingExclusiveMemory, &[F::InPlacePodVerticalScaling]),
    (
        F::InPlacePodVerticalScalingInitContainers,
        &[F::InPlacePodVerticalScaling, F::NodeDeclaredFeatures],
    ),
    (F::MatchLabelKeysInPodTopologySpreadSelectorMerge, &[F::MatchLabelKeysInPodTopologySpread]),
    (F::PodCertificateRequest, &[F::AuthorizeNodeWithSelectors]),
    (F::PodLevelResourceManagers, &[F::PodLevelResources]),
    (F::PodLifecycleSleepActionAllowZero, &[F::PodLifecycleSleepAction]),
    (F::ProcMountType, &[F::UserNamespacesSupport]),
    (F::ResourceHealthStatus, &[F::DynamicResourceAllocation]),
    (F::ResourceHealthStatusMessage, &[F::ResourceHealthStatus]),
    (F::RestartAllContainersOnContainerExits, &[F::ContainerRestartRules, F::NodeDeclaredFeatures]),
    (F::ServiceAccountTokenNodeBinding, &[F::ServiceAccountTokenNodeBindingValidation]),
    (F::StaleControllerConsistencyDaemonSet, &[F::AtomicFIFO]),
    (F::StaleControllerConsistencyJob, &[F::AtomicFIFO]),
    (F::StaleControllerConsistencyReplicaSet, &[F::AtomicFIFO]),
    (F::StaleControllerConsistencyStatefulSet, &[F::AtomicFIFO]),
    (F::StorageVersionAPI, &[F::APIServerIdentity]),
    (
        F::StructuredAuthenticationConfigurationEgressSelector,
        &[F::StructuredAuthenticationConfiguration],
    ),
    (
        F::StructuredAuthenticationConfigurationJWKSMetrics,
        &[F::StructuredAuthenticationConfiguration],
    ),
    (F::TopologyAwareWorkloadScheduling, &[F::GenericWorkload]),
    (F::UnknownVersionInteroperabilityProxy, &[F::APIServerIdentity]),
    (F::UserNamespacesHostNetworkSupport, &[F::NodeDeclaredFeatures, F::UserNamespacesSupport]),
    (F::WindowsGracefulNodeShutdown, &[F::GracefulNodeShutdown]),
    (F::WorkloadAwarePreemption, &[F::GangScheduling]),
    (F::WorkloadWithJob, &[F::GenericWorkload]),
];
