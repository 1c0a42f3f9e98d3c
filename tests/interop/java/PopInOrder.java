import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.AckCallback;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.PopCallback;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.consumer.PopStatus;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.constant.ConsumeInitMode;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/**
 * PopInOrder NAMESERVERS GROUP TOPIC DIGITS BROKER: makes topic and group, and pops each of the 4 queues in order, as
 * RocketMQ's proxy does for its clients (a stock push consumer with an orderly listener does not pop), until stdin
 * ends. It gives back what is behind the first try of every key that ends in DIGITS. Each attempt to pop is made twice,
 * as if the first answer were lost. A line per message consumed, and one per attempt with the counts of both answers.
 */
public final class PopInOrder {
    private static final long INVISIBLE_MS = 2000;
    private static final long TIMEOUT_MS = 3000;
    private final Set<String> failed = ConcurrentHashMap.newKeySet();
    private final MQClientInstance client;
    private final MQClientAPIImpl calls;
    private final String group;
    private final String topic;
    private final String digits;
    private volatile boolean isRunning = true;

    private PopInOrder(MQClientInstance client, String[] args) {
        this.client = client;
        this.calls = client.getMQClientAPIImpl();
        this.group = args[1];
        this.topic = args[2];
        this.digits = args[3];
    }

    public static void main(String[] args) throws Exception {
        ConsumeByPop.setMode(args[0], args[1], args[2], args[4], MessageRequestMode.POP);
        DefaultMQProducer connections = new DefaultMQProducer("pop-in-order");
        connections.setNamesrvAddr(args[0]);
        connections.setPollNameServerInterval(1000);
        connections.start();
        PopInOrder program = new PopInOrder(connections.getDefaultMQProducerImpl().getMqClientFactory(), args);
        for (int queue = 0; queue < 4; queue++) {
            int queueId = queue;
            Thread thread = new Thread(() -> program.run(queueId));
            thread.setDaemon(true);
            thread.start();
        }
        Lines.print("started", true);
        while (System.in.read() >= 0) {
            // until the test closes the pipe
        }
        program.isRunning = false;
        Lines.print("done", true);
        System.exit(0);
    }

    private void run(int queueId) {
        while (isRunning) {
            try {
                client.updateTopicRouteInfoFromNameServer(topic);
                String address = client.findBrokerAddressInPublish("broker-a");
                while (isRunning) {
                    consume(address, queueId);
                }
            } catch (Exception error) {
                Lines.print("refused", String.valueOf(error.getMessage()));
                pause();
            }
        }
    }

    private void consume(String address, int queueId) throws Exception {
        String attempt = UUID.randomUUID().toString();
        PopResult first = pop(address, queueId, attempt);
        if (first.getPopStatus() != PopStatus.FOUND) {
            return;
        }
        PopResult popped = pop(address, queueId, attempt);
        Lines.print("attempt", attempt, "first", counts(first), "again", counts(popped));
        if (popped.getPopStatus() != PopStatus.FOUND) {
            return;
        }
        List<MessageExt> messages = popped.getMsgFoundList();
        for (int i = 0; i < messages.size(); i++) {
            MessageExt message = messages.get(i);
            if (message.getKeys().endsWith(digits) && failed.add(message.getKeys())) {
                Lines.print("failed", message.getKeys());
                for (MessageExt left : messages.subList(i, messages.size())) {
                    giveBack(address, left);
                }
                return;
            }
            Lines.print("queue", queueId, "offset", message.getQueueOffset(), "key", message.getKeys());
            acknowledge(address, message);
        }
    }

    /** OFFSET:COUNT of each message: how often it was given before. */
    private static List<String> counts(PopResult popped) {
        List<String> counts = new ArrayList<>();
        if (popped.getPopStatus() == PopStatus.FOUND) {
            for (MessageExt message : popped.getMsgFoundList()) {
                counts.add(message.getQueueOffset() + ":" + message.getReconsumeTimes());
            }
        }
        return counts;
    }

    private PopResult pop(String address, int queueId, String attempt) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(group);
        header.setTopic(topic);
        header.setQueueId(queueId);
        header.setMaxMsgNums(8);
        header.setInvisibleTime(INVISIBLE_MS);
        header.setPollTime(500);
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(ConsumeInitMode.MIN);
        header.setExpType("TAG");
        header.setExp("*");
        header.setOrder(true);
        header.setAttemptId(attempt);
        header.setBrokerName("broker-a");
        CompletableFuture<PopResult> answer = new CompletableFuture<>();
        calls.popMessageAsync("broker-a", address, header, TIMEOUT_MS, new PopCallback() {
            @Override
            public void onSuccess(PopResult result) {
                answer.complete(result);
            }

            @Override
            public void onException(Throwable error) {
                answer.completeExceptionally(error);
            }
        });
        return answer.get(2 * TIMEOUT_MS, TimeUnit.MILLISECONDS);
    }

    private void acknowledge(String address, MessageExt message) throws Exception {
        String handle = message.getProperty(MessageConst.PROPERTY_POP_CK);
        AckMessageRequestHeader header = new AckMessageRequestHeader();
        header.setTopic(topic);
        header.setQueueId(message.getQueueId());
        header.setOffset(ExtraInfoUtil.getQueueOffset(ExtraInfoUtil.split(handle)));
        header.setConsumerGroup(group);
        header.setExtraInfo(handle);
        header.setBrokerName("broker-a");
        Answer answer = new Answer();
        calls.ackMessageAsync(address, TIMEOUT_MS, answer, header);
        answer.get(2 * TIMEOUT_MS, TimeUnit.MILLISECONDS);
    }

    private void giveBack(String address, MessageExt message) throws Exception {
        String handle = message.getProperty(MessageConst.PROPERTY_POP_CK);
        ChangeInvisibleTimeRequestHeader header = new ChangeInvisibleTimeRequestHeader();
        header.setTopic(topic);
        header.setQueueId(message.getQueueId());
        header.setOffset(ExtraInfoUtil.getQueueOffset(ExtraInfoUtil.split(handle)));
        header.setConsumerGroup(group);
        header.setExtraInfo(handle);
        header.setInvisibleTime(50L);
        header.setBrokerName("broker-a");
        Answer answer = new Answer();
        calls.changeInvisibleTimeAsync("broker-a", address, header, TIMEOUT_MS, answer);
        answer.get(2 * TIMEOUT_MS, TimeUnit.MILLISECONDS);
    }

    private static void pause() {
        try {
            Thread.sleep(100);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private static final class Answer extends CompletableFuture<AckResult> implements AckCallback {
        @Override
        public void onSuccess(AckResult result) {
            complete(result);
        }

        @Override
        public void onException(Throwable error) {
            completeExceptionally(error);
        }
    }
}
