{{/* Replicas of a workload: those asked for; where it is autoscaled, those that run, since a workload
     that is applied without a number falls to 1. None where helm cannot ask the cluster, or at
     the first install. Arguments: root, values, apiVersion, kind, name. */}}
{{- define "outrider.replicas" -}}
{{- if not .values.autoscaling.enabled -}}
{{- .values.replicas -}}
{{- else -}}
{{- with lookup .apiVersion .kind .root.Release.Namespace .name -}}
{{- if hasKey .spec "replicas" }}{{ int .spec.replicas }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether scorers may be scaled to zero, so that gateways have to hold requests. */}}
{{- define "outrider.toZero" -}}
{{- with .Values.scorer.autoscaling }}{{ if and .enabled (eq (int .minReplicas) 0) }}true{{ end }}{{ end -}}
{{- end -}}

{{/* Requests per scorer that bring another one. */}}
{{- define "outrider.requestsPerScorer" -}}
{{- with .Values.scorer -}}
{{- default (divf (mul 3 (get .flags "max-num-seqs" | default 128)) 4 | ceil) .autoscaling.requests -}}
{{- end -}}
{{- end -}}

{{/* Who grows by which signals, as a JSON list. A signal is a sum that the pods share: the number of
     pods that it asks for, value divided by target, does not depend on how many there are, so that
     nothing runs away. `namespace` and `job` are labels that the ServiceMonitor gives. */}}
{{- define "outrider.scalers" -}}
{{- $fullname := include "outrider.fullname" . -}}
{{- $of := printf "namespace=\"%s\",job=\"%s" .Release.Namespace $fullname -}}
{{- $gateways := printf "%s-gateway\"" $of -}}
{{- $scorers := printf "%s-scorer\"" $of -}}
{{- $open := printf "sum(outrider:gateway_requests_in_flight{%s})" $gateways -}}
{{- $scalers := list -}}
{{- with .Values.gateway.autoscaling -}}
{{- if .enabled -}}
{{- $signals := list (dict "name" "open" "target" .openStreams "query" $open) -}}
{{- $scalers = append $scalers (dict "component" "gateway" "kind" "Deployment" "name" "gateway" "values" . "signals" $signals "behavior" dict) -}}
{{- end -}}
{{- end -}}
{{- with .Values.scorer.autoscaling -}}
{{- if .enabled -}}
{{- $each := include "outrider.requestsPerScorer" $ | float64 -}}
{{- $signals := list
  (dict "name" "requests" "target" $each "query" (printf "sum(outrider:num_requests_running{%s}) + sum(outrider:num_requests_waiting{%s})" $scorers $scorers))
  (dict "name" "open" "target" $each "query" $open)
  (dict "name" "kv" "target" .kvUsage "query" (printf "sum(outrider:kv_cache_usage_perc{%s})" $scorers)) -}}
{{- $behavior := dict
  "scaleUp" (dict "stabilizationWindowSeconds" 30 "policies" (list (dict "type" "Pods" "value" 2 "periodSeconds" 60)))
  "scaleDown" (dict "stabilizationWindowSeconds" 600 "policies" (list (dict "type" "Pods" "value" 1 "periodSeconds" 120))) -}}
{{- $scorer := dict "component" "scorer" "kind" "StatefulSet" "name" "scorer" "values" . "signals" $signals "behavior" $behavior -}}
{{- if gt (int $.Values.scorer.parallel.nodes) 1 -}}
{{- $_ := set $scorer "target" (dict "apiVersion" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet" "name" (printf "%s-scorer-ranks" $fullname)) -}}
{{- end -}}
{{- $scalers = append $scalers $scorer -}}
{{- end -}}
{{- end -}}
{{- range $pool := keys .Values.proposers | sortAlpha -}}
{{- with (include "outrider.pool" (dict "root" $ "pool" $pool) | fromYaml) -}}
{{- if and .autoscaling.enabled (eq .placement "remote") -}}
{{- $rounds := printf "sum(rate(outrider:pool_rounds_total{%s,pool=\"%s\"%%s}[2m]))" $scorers $pool -}}
{{- $late := printf "%s / %s" (printf $rounds ",fate=\"late\"") (printf $rounds "") -}}
{{- $work := printf "sum(rate(outrider:proposer_cycle_seconds_sum{%s-proposer-%s\"}[2m])) * (1 + ((%s > bool %v) or vector(0)))" $of $pool $late .autoscaling.lateMisses -}}
{{- $signals := list (dict "name" "work" "target" .autoscaling.utilisation "query" $work) -}}
{{- if eq $.Values.autoscaling.engine "keda" -}}
{{- $signals = append $signals (dict "name" "sessions" "target" .autoscaling.sessions "query" (printf "sum(outrider:num_requests_running{%s})" $scorers)) -}}
{{- end -}}
{{- $behavior := dict
  "scaleUp" (dict "policies" (list (dict "type" "Pods" "value" 2 "periodSeconds" 60)))
  "scaleDown" (dict "stabilizationWindowSeconds" 300 "policies" (list (dict "type" "Pods" "value" 1 "periodSeconds" 60))) -}}
{{- $scalers = append $scalers (dict "component" "proposer" "kind" "Deployment" "name" (printf "proposer-%s" $pool) "pool" $pool "values" .autoscaling "signals" $signals "behavior" $behavior) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $scalers -}}
{{- end -}}
