{{/* Hidden states that the scorers keep: what is asked for, else what the pools' methods read, and
     beside them what the scorers' own does. That alone is left to the scorers, which can tell which
     layers a module in a folder reads. */}}
{{- define "outrider.hiddenFeatures" -}}
{{- $states := list -}}
{{- range $pool := keys .Values.proposers -}}
{{- $states = append $states (include "outrider.states" (dict "values" (include "outrider.pool" (dict "root" $ "pool" $pool) | fromYaml))) -}}
{{- end -}}
{{- with include "outrider.inProcess" . | fromYaml -}}
{{- if compact $states }}{{ $states = append $states (include "outrider.states" (dict "values" .)) }}{{ end -}}
{{- end -}}
{{- default ($states | compact | uniq | sortAlpha | join ",") (toString .Values.scorer.hiddenFeatures) -}}
{{- end -}}

{{/* The value with which vLLM cannot give out hidden states, or nothing (docs/vllm.md). */}}
{{- define "outrider.withoutStates" -}}
{{- $found := list -}}
{{- with .Values.scorer -}}
{{- if gt (int .parallel.pipeline) 1 }}{{ $found = append $found "scorer.parallel.pipeline" }}{{ end -}}
{{- range $flag, $value := .vllmFlags -}}
{{- $shared := and (has $flag (list "decode-context-parallel-size" "prefill-context-parallel-size")) (ne (toString $value) "1") -}}
{{- if or $shared (has $flag (list "kv-transfer-config" "kv-offloading-size")) }}{{ $found = append $found (printf "scorer.vllmFlags.%s" $flag) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- first (append $found "") -}}
{{- end -}}

{{/* What a scorer downloads to draft itself: arguments of the init container, as a JSON list. */}}
{{- define "outrider.inProcessFetch" -}}
{{- $names := list -}}
{{- with include "outrider.inProcess" . | fromYaml -}}
{{- $args := dict "values" . -}}
{{- if and (include "outrider.weights" $args) (include "outrider.isRemote" .model) -}}
{{- $names = append $names .model -}}
{{- if include "outrider.module" $args }}{{ $names = append $names (printf "--module-of=%s" $.Values.model.name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* GPUs of a replica, and of each of its pods. */}}
{{- define "outrider.gpus" -}}
{{- with .Values.scorer.parallel }}{{ mul .tensor .pipeline }}{{ end -}}
{{- end -}}
{{- define "outrider.podGpus" -}}
{{- div (include "outrider.gpus" .) .Values.scorer.parallel.nodes -}}
{{- end -}}

{{- define "outrider.dtype" -}}
{{- default (ternary "float32" "bfloat16" (eq .Values.scorer.device "cpu")) .Values.model.dtype -}}
{{- end -}}

{{/* Flags of the engine: how vLLM shares a model over GPUs and nodes. */}}
{{- define "outrider.engineFlags" -}}
{{- with .Values.scorer }}
- --engine={{ .engine }}
{{- if eq .engine "vllm" }}
- --tensor-parallel-size={{ .parallel.tensor }}
- --pipeline-parallel-size={{ .parallel.pipeline }}
{{- if .parallel.expert }}
- --enable-expert-parallel
{{- end }}
{{- if gt (int .parallel.nodes) 1 }}
- --nnodes={{ .parallel.nodes }}
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port=29500
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A scorer's pod, as a template. Arguments: root; rank: leader or follower where a replica is
     several pods, of which the leader alone serves. */}}
{{- define "outrider.scorerPod" -}}
{{- $root := .root -}}
{{- $values := .root.Values.scorer -}}
{{- $parallel := gt (include "outrider.gpus" .root | int) 1 -}}
{{- $args := dict "root" .root "component" "scorer" "values" $values "rank" .rank "grouped" .rank "claim" (not (empty .root.Values.model.cache.storage)) -}}
{{- $image := include "outrider.image" (dict "root" .root "device" $values.device "engine" $values.engine) -}}
{{- $remote := include "outrider.isRemote" .root.Values.model.name -}}
{{- $draft := include "outrider.inProcessFetch" .root | fromJsonArray -}}
{{- $fetched := or $remote $draft -}}
{{- $fetches := $fetched -}}
{{- $sidecars := list -}}
{{- range $pool := include "outrider.sidecars" .root | fromJsonArray -}}
{{- $merged := include "outrider.pool" (dict "root" $root "pool" $pool) | fromYaml -}}
{{- $sidecars = append $sidecars (dict "root" $root "component" "proposer" "pool" $pool "values" $merged "index" (len $sidecars)) -}}
{{- $fetches = or $fetches (include "outrider.poolFetches" (dict "root" $root "values" $merged)) -}}
{{- end -}}
{{- $args = merge $args (dict "fetches" $fetches "sidecars" $sidecars "image" $image) -}}
metadata:
  {{- include "outrider.podMetadata" $args | nindent 2 }}
spec:
  {{- include "outrider.podSpec" $args | nindent 2 }}
  {{- if or $fetched $values.pod.initContainers }}
  initContainers:
    {{- with $values.pod.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $remote }}
    - {{ include "outrider.fetch" (merge (dict "container" "fetch-model" "args" (list .root.Values.model.name)) $args) | nindent 6 | trim }}
    {{- end }}
    {{- with $draft }}
    - {{ include "outrider.fetch" (merge (dict "container" "fetch-draft" "args" .) $args) | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: scorer
      image: {{ $image }}
      command: [outrider, scorer]
      args:
        - "--host={{ .root.Values.listenAddress }}"
        - --port=7001
        - --data-port=7002
        - --metrics-port=9101
        - --health-port=9201
        - --scorer-id=$(POD_NAME)
        - --model={{ .root.Values.model.name }}
        - {{ printf "--served-model-name=%s" .root.Values.model.servedName | quote }}
        - --dtype={{ include "outrider.dtype" .root }}
        - --device={{ $values.device }}
        - --start-timeout={{ .root.Values.startSeconds }}
        - --drain-grace-seconds={{ $values.drainGraceSeconds }}
        {{- with include "outrider.hiddenFeatures" .root }}
        - --hidden-features={{ . }}
        {{- end }}
        {{- with include "outrider.inProcessFlags" .root }}
        - {{ printf "--in-process-proposer=%s" . | quote }}
        {{- end }}
        {{- if $sidecars }}
        - --listen-unix=/run/outrider/scorer.sock
        {{- end }}
        {{- with include "outrider.tlsFlags" .root }}{{ . | trim | nindent 8 }}{{ end }}
        {{- with include "outrider.engineFlags" .root }}{{ . | trim | nindent 8 }}{{ end }}
        {{- with include "outrider.ownFlags" (dict "values" $values "threads" 2) }}{{ . | trim | nindent 8 }}{{ end }}
        {{- with include "outrider.flags" $values.vllmFlags }}
        - --
        {{- . | trim | nindent 8 }}
        {{- end }}
      env:
        {{- include "outrider.podName" .root | nindent 8 }}
        {{- with include "outrider.env" (dict "root" .root "model" $fetched "env" $values.env) }}{{ . | trim | nindent 8 }}{{ end }}
      {{- /* A follower is vLLM's own process: nothing of it can be probed. */}}
      {{- if ne .rank "follower" }}
      ports:
        - {name: grpc, containerPort: 7001}
        - {name: data, containerPort: 7002}
        - {name: metrics, containerPort: 9101}
      {{- include "outrider.grpcProbes" (dict "root" .root "port" 9201 "service" "outrider.v1.ScorerService") | nindent 6 }}
      {{- end }}
      resources:
        {{- include "outrider.resources" $args | nindent 8 }}
      {{- include "outrider.container" $args | nindent 6 }}
      volumeMounts:
        {{- include "outrider.mounts" $args | nindent 8 }}
        {{- if $parallel }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $sidecars }}
        - {name: run, mountPath: /run/outrider}
        {{- end }}
    {{- range $sidecars }}
    - {{ include "outrider.proposerContainer" . | nindent 6 | trim }}
    {{- end }}
    {{- with $values.pod.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "outrider.volumes" $args | nindent 4 }}
    {{- if $parallel }}
    - name: shm # between the GPUs of the pod, for NCCL
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
    {{- end }}
    {{- if $sidecars }}
    - name: run # the sockets between the scorer and its proposers
      emptyDir: {}
    {{- end }}
{{- end -}}

{{/* The claims of each scorer's pod. */}}
{{- define "outrider.scorerClaims" -}}
{{- with .Values.model.cache }}
{{- if .storage }}
{{- if not .keepClaims }}
persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Delete}
{{- end }}
volumeClaimTemplates:
  - metadata: {name: cache}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClassName }}
      storageClassName: {{ quote . }}
      {{- end }}
      resources: {requests: {storage: {{ .storage }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Refuses other claims than the scorers have, before anything is applied: no version of Kubernetes
     lets volumeClaimTemplates be changed. Where helm cannot ask the cluster, its API server
     refuses them. */}}
{{- define "outrider.checkClaims" -}}
{{- $name := printf "%s-scorer" (include "outrider.fullname" .) -}}
{{- $namespace := .Release.Namespace -}}
{{- $set := (lookup "apps/v1" "StatefulSet" $namespace $name).spec -}}
{{- $mend := printf "Run `kubectl -n %s delete statefulset %s --cascade=orphan`, which leaves the pods running, and this upgrade again, which takes them over. Claims that exist keep their size: enlarge each with `kubectl -n %s patch pvc cache-%s-0 -p '{\"spec\": {\"resources\": {\"requests\": {\"storage\": ...}}}}'`, where its StorageClass allows that." $namespace $name $namespace $name -}}
{{- if gt (int .Values.scorer.parallel.nodes) 1 -}}
{{- $name = printf "%s-ranks" $name -}}
{{- $set = ((lookup "leaderworkerset.x-k8s.io/v1" "LeaderWorkerSet" $namespace $name).spec | default dict).leaderWorkerTemplate -}}
{{- $mend = printf "Run `kubectl -n %s delete leaderworkerset %s`, which ends its pods, and this upgrade again." $namespace $name -}}
{{- end -}}
{{- if $set -}}
{{- $before := include "outrider.claim" (first (default (list dict) $set.volumeClaimTemplates)) | fromJsonArray -}}
{{- $after := include "outrider.claim" (first (default (list dict) (include "outrider.scorerClaims" . | fromYaml).volumeClaimTemplates)) | fromJsonArray -}}
{{- if ne (first $before) (first $after) -}}
{{- fail (printf "model.cache: the scorers' claims cannot be changed from %s to %s. %s" (last $before) (last $after) $mend) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A claim's template, as a JSON list: once to compare, once to read. */}}
{{- define "outrider.claim" -}}
{{- $storage := "none" -}}
{{- $size := "0" -}}
{{- $class := "" -}}
{{- with .spec -}}
{{- $storage = .resources.requests.storage -}}
{{- $size = include "outrider.quantity" $storage -}}
{{- with .storageClassName }}{{ $class = printf " of class %s" . }}{{ end -}}
{{- end -}}
{{- list (print $size $class) (print $storage $class) | toJson -}}
{{- end -}}
