{{/* Pools in the scorers' pods, by name, as a JSON list: the place is the port's. */}}
{{- define "outrider.sidecars" -}}
{{- $names := list -}}
{{- range $pool := keys .Values.proposers | sortAlpha -}}
{{- if eq (include "outrider.pool" (dict "root" $ "pool" $pool) | fromYaml).placement "sidecar" -}}
{{- $names = append $names $pool -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

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
{{- default ($states | compact | uniq | sortAlpha | join ",") .Values.scorer.hiddenFeatures -}}
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

{{/* torchrun, which starts this pod's ranks of the service. */}}
{{- define "outrider.torchrun" -}}
{{- $parallel := .Values.scorer.tensorParallel -}}
command:
  - python
  - -P
  - -m
  - torch.distributed.run
  - --nproc-per-node={{ div $parallel.size $parallel.nodes }}
  {{- if gt (int $parallel.nodes) 1 }}
  - --nnodes={{ $parallel.nodes }}
  - --node-rank=$(LWS_WORKER_INDEX)
  - --master-addr=$(LWS_LEADER_ADDRESS)
  - --master-port=29500
  - --rdzv-conf=timeout={{ .Values.startSeconds }}
  {{- else }}
  - --standalone
  {{- end }}
  - --shutdown-timeout={{ add .Values.scorer.drainGraceSeconds 10 }}
  - -m
  - scorer_service
{{- end -}}

{{/* A scorer's pod, as a template. Arguments: root; rank: leader or follower where a replica is
     several pods, of which the leader alone serves. */}}
{{- define "outrider.scorerPod" -}}
{{- $root := .root -}}
{{- $values := .root.Values.scorer -}}
{{- $parallel := gt (int $values.tensorParallel.size) 1 -}}
{{- $args := dict "root" .root "component" "scorer" "values" $values "grouped" .rank "claim" (not (empty .root.Values.model.cache.storage)) -}}
{{- $image := include "outrider.image" (dict "root" .root "device" $values.device) -}}
{{- $remote := include "outrider.isRemote" .root.Values.model.name -}}
{{- $draft := include "outrider.inProcessFetch" .root | fromJsonArray -}}
{{- $fetched := or $remote $draft -}}
{{- $fetches := $fetched -}}
{{- $sidecars := list -}}
{{- if ne .rank "follower" -}}
{{- range $pool := include "outrider.sidecars" .root | fromJsonArray -}}
{{- $merged := include "outrider.pool" (dict "root" $root "pool" $pool) | fromYaml -}}
{{- $sidecars = append $sidecars (dict "root" $root "pool" $pool "values" $merged "index" (len $sidecars)) -}}
{{- $fetches = or $fetches (include "outrider.poolFetches" (dict "root" $root "values" $merged)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $args "fetches" $fetches -}}
metadata:
  labels: # not the chart's version: it alone would restart every pod
    {{- include "outrider.selector" $args | nindent 4 }}
    {{- with .rank }}
    outrider/rank: {{ . }}
    {{- end }}
    app.kubernetes.io/part-of: outrider
spec:
  {{- include "outrider.podSpec" $args | nindent 2 }}
  {{- if $fetched }}
  initContainers:
    {{- if $remote }}
    - {{ include "outrider.fetch" (dict "root" .root "container" "fetch-model" "image" $image "args" (list .root.Values.model.name)) | nindent 6 | trim }}
    {{- end }}
    {{- with $draft }}
    - {{ include "outrider.fetch" (dict "root" $root "container" "fetch-draft" "image" $image "args" .) | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: scorer
      image: {{ $image }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      {{- if $parallel }}
      {{- include "outrider.torchrun" .root | nindent 6 }}
      {{- else }}
      command: [outrider, scorer]
      {{- end }}
      args:
        - --host=0.0.0.0
        - --port=7001
        - --data-port=7002
        - --metrics-port=9101
        - --health-port=9201
        - --scorer-id=$(POD_NAME)
        - --model={{ .root.Values.model.name }}
        - {{ printf "--served-model-name=%s" .root.Values.model.servedName | quote }}
        - --dtype={{ .root.Values.model.dtype }}
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
        {{- with include "outrider.flags" $values.flags }}{{ . | trim | nindent 8 }}{{ end }}
      env:
        {{- include "outrider.podName" .root | nindent 8 }}
        {{- with include "outrider.env" (dict "root" .root "model" $fetched "env" $values.env) }}{{ . | trim | nindent 8 }}{{ end }}
      {{- if ne .rank "follower" }}
      ports:
        - {name: grpc, containerPort: 7001}
        - {name: data, containerPort: 7002}
        - {name: metrics, containerPort: 9101}
      {{- end }}
      {{- include "outrider.grpcProbes" (dict "root" .root "port" 9201 "service" "outrider.v1.ScorerService") | nindent 6 }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        {{- include "outrider.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "outrider.mounts" .root | nindent 8 }}
        {{- if $parallel }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $sidecars }}
        - {name: run, mountPath: /run/outrider}
        {{- end }}
    {{- range $sidecars }}
    - {{ include "outrider.proposerContainer" . | nindent 6 | trim }}
    {{- end }}
  volumes:
    {{- include "outrider.volumes" $args | nindent 4 }}
    {{- if $parallel }}
    - name: shm # between the GPUs of the pod, for NCCL
      emptyDir: {medium: Memory, sizeLimit: 2Gi}
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
volumeClaimTemplates:
  - metadata: {name: cache}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ .storage }}}}
{{- end }}
{{- end }}
{{- end -}}
